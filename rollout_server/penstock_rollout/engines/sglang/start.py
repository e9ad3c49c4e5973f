"""Starting SGLang: its arguments, its environment, and the child process that runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError
from penstock_rollout.engines.sglang.child import API_KEY_VARIABLE

HOST = "127.0.0.1"
LAUNCH_MODULE = "sglang.launch_server"
END_TIMEOUT_S = 10.0

SET_BY_PENSTOCK = frozenset(
    {
        "model_path", "host", "port", "api_key", "admin_api_key", "weight_version", "context_length", "tp_size",
        "skip_tokenizer_init", "incremental_streaming_output", "tokenizer_worker_num", "dp_size", "attn_dp_size",
        "enable_metrics",
    }
)  # fmt: skip
"""Arguments that the engine's guarantees rest on, or that another setting decides: `extra` may not name them."""


def server_arguments(
    config: EngineConfig, model_path: Path, dtype: str, seed: int, *, policy_version: int, port: int
) -> list[str]:
    """The command line of SGLang's server, `extra` included."""
    if refused := sorted(SET_BY_PENSTOCK & config.extra.keys()):
        raise ConfigError(f"rollout.engine.extra may not set {', '.join(refused)}; Penstock sets it")
    if config.keep_kv_cache and config.extra.get("disable_overlap_schedule") is False:
        raise ConfigError(
            "the overlap scheduler stamps a token of the old weights as new when the KV cache is kept; "
            "leave disable_overlap_schedule, or set rollout.engine.keep_kv_cache to false"
        )
    settings: dict[str, Any] = {
        "model_path": str(model_path),
        "host": HOST,
        "port": port,
        "dtype": dtype,
        "random_seed": seed,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_parallel_size,
        "weight_version": str(policy_version),
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "enable_metrics": True,
        "enable_deterministic_inference": True,
        "disable_overlap_schedule": config.keep_kv_cache,
        "disable_decode_cuda_graph": config.enforce_eager,
        "disable_prefill_cuda_graph": config.enforce_eager,
        "log_level": "warning",
    }
    if "gpu_memory_utilization" in config.model_fields_set:
        settings["mem_fraction_static"] = config.gpu_memory_utilization
    return [word for name, value in (settings | config.extra).items() for word in _words(name, value)]


def honours_seeds(config: EngineConfig) -> bool:
    """SGLang draws by a request's own seed only when it infers deterministically."""
    return config.extra.get("enable_deterministic_inference") is not False


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


class SglangChild:
    """SGLang's server and the processes it starts: one process group, which ends with this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str], api_key: str) -> SglangChild:
        """Its output goes where this process's does."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock_rollout.engines.sglang.child", str(os.getpid()), module, *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(api_key),
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def end(self) -> None:
        """Ask it to end, then make sure that nothing of its group is left."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


def _environment(api_key: str) -> dict[str, str]:
    """Ours, with the log-probs of the distribution that is sampled; SGLang can be told to report others."""
    return {
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        API_KEY_VARIABLE: api_key,
    }
