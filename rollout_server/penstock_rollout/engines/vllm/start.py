"""Start vLLM: set its environment, build its arguments, create the AsyncLLM."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, Unavailable
from penstock.machine import collecting_rarely
from penstock.weights.folder_tensors import has_other_parts, read_json

CPU_KV_CACHE_BYTES = 64 << 20
CONTROL_TIMEOUT_S = 60.0
"""Timeout of a call to EngineCore, which answers between two decode steps."""
LOAD_TIMEOUT_S = 600.0

PROFILED_STEPS = 100
"""Decoding steps of a version that are recorded. All of a version would be gigabytes."""
PROFILES = Path("profiles")
"""The folder for traces, if the caller names none."""
CHUNK_TOKENS = "penstock_chunk_tokens"
"""The key in the `extra_args` of a request: how many tokens EngineCore sends at once. Without it, it sends each one."""
VERSION_MARK = "penstock-version-"
"""An output of EngineCore whose request id is this and a version marks where the tokens of that version begin. vLLM's
output handler ignores it, because there is no such request."""

_CORE = "penstock_rollout.engines.vllm.core"
_MODULES = ("vllm.v1.engine.core", _CORE)
_WORKERS = {
    True: ("vllm.v1.worker.cpu_worker",),
    False: ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
}
"""By whether the CPU wheel is installed."""


class SchedulerLoad:
    """A vLLM stat logger that keeps the scheduler's latest figures and counts generated tokens."""

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.waiting_requests = 0
        self.kv_cache_usage = 0.0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> SchedulerLoad:
        """Act as the factory that vLLM expects. All engine indices share this object."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.waiting_requests = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_generated_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


def is_cpu_build() -> bool:
    """Return whether the CPU wheel of vLLM is installed. Reads package metadata and does not import vLLM."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads at import. Variables that the user has set stay as they are. Child
    processes inherit them. Besides the start method in `create_llm`, nothing else of this engine changes the
    environment."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if is_cpu_build():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    else:
        # The server has threads before it has an engine, and a process that has used CUDA must not be forked.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # FlashInfer's sampler needs nvcc, and cannot return the log-probs that every request asks for.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def preload(architectures: Sequence[str]) -> str:
    """Import what EngineCore needs, and the model's class. Returns why it could not, in one line."""
    prepare_environment()
    try:
        for module in (*_MODULES, *_WORKERS[is_cpu_build()]):
            importlib.import_module(module)
        _note_model_class(architectures)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _note_model_class(architectures: Sequence[str]) -> None:
    """Import the model's class and note what it is in vLLM's cache, where the server's vLLM looks first. vLLM would
    start a process for this, so that the server does not use CUDA; call this in a process that may. If it fails, the
    server's vLLM does it in its own way, and says what is wrong with the model, except that a package is missing:
    raises ModuleNotFoundError."""
    try:
        from vllm.model_executor.models import registry

        in_process, registry._run_in_subprocess = registry._run_in_subprocess, lambda function: function()
        try:
            for architecture in architectures:
                if architecture in registry.ModelRegistry.models:
                    model = registry.ModelRegistry.models[architecture]
                    model.inspect_model_cls()
                    model.load_model_cls()
        finally:
            registry._run_in_subprocess = in_process
    except ModuleNotFoundError:
        raise
    except Exception as error:
        print(f"the class of {', '.join(architectures)} was not imported ahead: {error}", file=sys.stderr)


def architectures_of(model_path: Path) -> list[str]:
    return read_json(model_path / "config.json").get("architectures") or []


def engine_arguments(
    config: EngineConfig, model_path: Path, dtype: str, seed: int, profiles: Path = PROFILES
) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs. Arguments in `rollout.engine.extra` come last and win. `profiles` is the
    folder for traces of `profile_versions`."""
    executor = "InProcessExecutor" if config.tensor_parallel_size == 1 else "TensorParallelExecutor"
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": dtype,
        "seed": seed,
        # Only constrained output needs the tokenizer, which is why a folder may do without.
        "skip_tokenizer_init": not (model_path / "tokenizer_config.json").exists(),
        "structured_outputs_config": {"backend": "xgrammar"},
        "use_tqdm_on_load": False,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "quantization": config.quantization,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": f"{_CORE}.WeightStaging",
        "distributed_executor_backend": f"{_CORE}.{executor}",
    }
    if is_cpu_build():
        arguments["enforce_eager"] = True
        # If the prompt of a seeded request were split over steps, EngineCore would die: a CPU generator has no rewind.
        arguments["enable_chunked_prefill"] = False
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if has_other_parts(model_path):
        arguments["language_model_only"] = True
    if config.profile_versions:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(profiles),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
            "max_iterations": PROFILED_STEPS,
        }
    return arguments | config.extra


def create_llm(
    arguments: dict[str, Any],
    load: SchedulerLoad,
    core_process: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Create the AsyncLLM. Blocks until EngineCore has loaded the model. `core_process` is called when vLLM is
    imported. Within its block, vLLM starts EngineCore's process (standby.py). By default, the process is forked on CPU,
    so it need not import vLLM again. Call this before the process computes with several OpenMP threads, which do not
    survive a fork. VLLM_WORKER_MULTIPROC_METHOD=spawn avoids the fork, but is slower. vLLM overwrites that variable
    while it creates its config, so it is set again afterwards."""
    prepare_environment()
    start_method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with collecting_rarely():
        is_forked = is_cpu_build() and start_method == "fork"  # then EngineCore need not import it
        if is_forked and (problem := preload(architectures_of(Path(arguments["model"])))):
            raise ConfigError(
                f"vLLM cannot serve {arguments['model']} ({problem}); install what is missing, or set "
                "rollout.engine.name to torch"
            )
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    starting = core_process()
    try:
        # Not as a dict: vLLM sets its attributes if `extra` names a reasoning parser.
        constraints = StructuredOutputsConfig(**arguments["structured_outputs_config"])
        arguments = arguments | {"structured_outputs_config": constraints}
        engine_args = AsyncEngineArgs(**arguments)
        if is_cpu_build():
            _fit_recurrent_layers(engine_args)
        vllm_config = engine_args.create_engine_config()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses rollout.engine: {_first_sentence(error)}; correct it") from error
    _check_flips(arguments, vllm_config)
    if is_cpu_build():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
    scheduler = vllm_config.scheduler_config
    name = "ChunkedAsyncScheduler" if scheduler.async_scheduling else "ChunkedScheduler"
    scheduler.scheduler_cls = f"{_CORE}.{name}"
    try:
        with starting:
            return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[load])
    except RuntimeError as error:
        raise Unavailable(
            f"vLLM did not start ({_first_sentence(error)}); its own lines in the log say why, often too little memory"
        ) from error


def _fit_recurrent_layers(engine_args: Any) -> None:
    """Cache no prefixes of a hybrid model on a CPU: vLLM caches states only if it may split prompts over steps. Raises
    ConfigError for gated delta nets in another type than bfloat16, with which EngineCore would die at a request."""
    model = engine_args.create_model_config()
    if not model.is_hybrid:
        return
    if not engine_args.enable_chunked_prefill:
        engine_args.enable_prefix_caching = False
    if hasattr(model.hf_text_config, "linear_key_head_dim") and str(model.dtype) != "torch.bfloat16":
        raise ConfigError(
            f"vLLM computes the gated delta nets of {engine_args.model} in bfloat16 only on a CPU; set model.dtype to "
            "bfloat16, or rollout.engine.name to torch"
        )


def _check_flips(arguments: dict[str, Any], config: Any) -> None:
    """Raise ConfigError if `rollout.engine.extra` takes away what a flip inside EngineCore needs (core.py): our
    executor and scheduler, all KV inside vLLM, and one EngineCore, because several would have to pause together."""
    needed = {
        "distributed_executor_backend": str(arguments["distributed_executor_backend"]).startswith(_CORE),
        "scheduler_cls": config.scheduler_config.scheduler_cls is None,
        "kv_transfer_config": config.kv_transfer_config is None,
        "data_parallel_size": config.parallel_config.data_parallel_size == 1,
    }
    if replaced := [name for name, is_ours in needed.items() if not is_ours]:
        raise ConfigError(
            f"rollout.engine.extra sets {', '.join(replaced)}, with which new weights cannot be loaded between two "
            "steps; remove it"
        )


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of a vLLM error, which may be a page long."""
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return " ".join(text.split()).split(". ")[0].removeprefix("Value error, ")
