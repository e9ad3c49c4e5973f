"""Which engine a rollout server runs."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError
from penstock_rollout.engines.engine import Engine
from penstock_rollout.engines.vllm.start import is_cpu_build

logger = logging.getLogger(__name__)


def resolve_engine_name(config: EngineConfig) -> str:
    """`vllm`, `sglang` or `torch`. An engine that was asked for by name is never replaced by another."""
    vllm_found = importlib.util.find_spec("vllm") is not None
    if config.name in ("vllm", "sglang") and importlib.util.find_spec(config.name) is None:
        raise ConfigError(
            f"rollout.engine.name is {config.name}, but {config.name} is not installed; install it, or use torch"
        )
    if config.name != "auto":
        return config.name
    if vllm_found:
        logger.info("engine auto: vllm, which is installed")
        return "vllm"
    logger.info("engine auto: torch, because vllm is not installed")
    return "torch"


def create_engine(config: EngineConfig, model_path: Path, dtype: str, seed: int) -> Engine:
    """An engine that is not started yet. Imports only the one that was chosen."""
    name = resolve_engine_name(config)
    if config.quantization is not None and (name != "vllm" or is_cpu_build()):
        raise ConfigError(f"rollout.engine.quantization is {config.quantization}, which needs vllm on CUDA")
    if name == "vllm":
        from penstock_rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(config, model_path, dtype, seed)
    if name == "sglang":
        from penstock_rollout.engines.sglang.engine import SglangEngine

        return SglangEngine(config, model_path, dtype, seed)
    from penstock_rollout.engines.torch.engine import TorchEngine

    return TorchEngine(config, model_path, dtype, seed)
