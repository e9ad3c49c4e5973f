"""Choose, create and start the engine of a process."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, Unavailable
from penstock.machine import freeze_loaded_objects, idle_gpus
from penstock.weights.folder_tensors import language_fields, read_json
from penstock_rollout.engines.engine import Engine
from penstock_rollout.engines.vllm.standby import start_standby
from penstock_rollout.engines.vllm.start import PROFILES, is_cpu_build

logger = logging.getLogger(__name__)
_NOT_UPDATED_BY_VLLM = ("gpt_oss",)
_SCORED_BY_SIGMOID = ("deepseek_v3",)
_UNFIT_TYPES = """
    axk2 deepseek_v32 deepseek_v4 glm5_next_text glm_moe_dsa hy_v4 inkling_text minimax nemotron_h openai-gpt paligemma
    qwen4_exp_text recurrent_gemma rwkv xlstm zamba2
"""
_UNFIT_FOR_TORCH = frozenset(_UNFIT_TYPES.split())
"""Types whose forward in transformers is wrong for several rows at once, or keeps its states in a way of its own."""


def resolve_engine_name(config: EngineConfig) -> str:
    """Return `vllm`, `sglang` or `torch`. An engine that the config names is never replaced by another."""
    if config.name in ("vllm", "sglang") and importlib.util.find_spec(config.name) is None:
        raise ConfigError(
            f"rollout.engine.name is {config.name}, but {config.name} is not installed; install it, or use torch"
        )
    if config.name != "auto":
        return config.name
    has_vllm = importlib.util.find_spec("vllm") is not None
    logger.info("engine auto: %s", "vllm, which is installed" if has_vllm else "torch, because vllm is not installed")
    return "vllm" if has_vllm else "torch"


def check_devices(name: str, config: EngineConfig) -> None:
    """Raise ConfigError if this machine has too few GPUs for the engine."""
    if name == "torch" or (name == "vllm" and is_cpu_build()):
        return
    import torch

    num_here, num_needed = torch.cuda.device_count(), config.tensor_parallel_size
    if num_here < num_needed:
        idle, lower = "" if num_here else idle_gpus(), "lower rollout.engine.tensor_parallel_size"
        found = idle or f"{num_here}; {lower}, or use rollout.engine.name torch"
        raise ConfigError(
            f"rollout.engine {name} needs {num_needed} GPU{'s' * (num_needed > 1)}, but this machine has {found}"
        )


def check_serves_model(name: str, model_path: Path) -> None:
    """Raise ConfigError if the engine would serve this model with silent errors or die at a request. vLLM
    reloads layer by layer, through each parameter's loader. Its gpt_oss writes experts and sinks past the loaders, into
    parameters that have no memory during a reload: nothing fails, and they keep their values (in 0.32 on a CPU, the
    next forward pass fails). Its deepseek_v3 scores experts by a softmax unless config.json says `sigmoid`, which is
    what the model always uses; transformers omits that in folders that it writes."""
    whole = read_json(model_path / "config.json")
    config = language_fields(whole)
    model_type = config.get("model_type")
    is_unfit = {model_type, whole.get("model_type")} & _UNFIT_FOR_TORCH or config.get("mamba_rms_norm")
    if name == "torch" and is_unfit:
        raise ConfigError(
            f"model.path {model_path} is of type {whole['model_type']}, which the torch engine cannot serve; set "
            "rollout.engine.name to vllm, or use another model"
        )
    if name == "vllm" and model_type in _NOT_UPDATED_BY_VLLM:
        raise ConfigError(
            f"model.path {model_path} is of type {model_type}, whose experts vLLM does not update; set "
            "rollout.engine.name to torch, or use another model"
        )
    if name == "vllm" and model_type in _SCORED_BY_SIGMOID and config.get("scoring_func") != "sigmoid":
        raise ConfigError(
            f"{model_path}/config.json has no scoring_func, so vLLM would choose experts in another way than the "
            'learner; add "scoring_func": "sigmoid" to it'
        )


def create_engine(
    config: EngineConfig, model_path: Path, dtype: str, seed: int, *, report_experts: bool = False,
    profiles: Path = PROFILES,
) -> Engine:  # fmt: skip
    """Create the engine without starting it. Imports only the engine that was chosen. `report_experts` asks for the
    experts that a mixture of experts chooses (`learner.router.replay`), `profiles` is the folder for traces of
    `profile_versions`."""
    name = resolve_engine_name(config)
    check_settings(name, config, report_experts=report_experts)
    if name == "vllm":
        standby = start_standby(config, model_path)  # before anything else is imported
        from penstock_rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(
            config, model_path, dtype, seed, report_experts=report_experts, standby=standby, profiles=profiles
        )
    if name == "sglang":
        from penstock_rollout.engines.sglang.engine import SglangEngine

        return SglangEngine(config, model_path, dtype, seed)
    from penstock_rollout.engines.torch.engine import TorchEngine

    return TorchEngine(config, model_path, dtype, seed, report_experts=report_experts)


def check_settings(name: str, config: EngineConfig, *, report_experts: bool) -> None:
    """Raise ConfigError if the engine does not have what the settings ask for."""
    if config.profile_versions and name != "vllm":
        raise ConfigError(
            f"rollout.engine.profile_versions needs rollout.engine.name vllm, not {name}; set it to [], or use vllm"
        )
    if report_experts and name == "sglang":
        raise ConfigError("learner.router.replay needs rollout.engine.name vllm or torch, not sglang; set it to false")
    if config.quantization is not None and (name != "vllm" or is_cpu_build()):
        raise ConfigError(f"rollout.engine.quantization is {config.quantization}, which needs vllm on CUDA")


async def start_engine(engine: Engine, timeout_s: float) -> None:
    """Load the model folder as version 0. The garbage collector then skips all that has been loaded."""
    try:
        await asyncio.wait_for(engine.start(policy_version=0), timeout_s)
    except TimeoutError as error:
        raise Unavailable(
            f"the {engine.name} engine was not ready after {timeout_s:.0f} s; raise rollout.start_timeout_s"
        ) from error
    freeze_loaded_objects()
