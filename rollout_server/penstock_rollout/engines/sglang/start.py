"""Start SGLang: build its arguments and its environment, and run it in a child process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
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
        "pp_size", "enable_metrics",
    }
)  # fmt: skip
"""Arguments that `extra` must not set: the engine's guarantees depend on them, or another setting decides them."""


def server_arguments(
    config: EngineConfig, model_path: Path, dtype: str, seed: int, *, policy_version: int, port: int
) -> list[str]:
    """Build the command line of SGLang's server, including `rollout.engine.extra`."""
    if refused := sorted(SET_BY_PENSTOCK & config.extra.keys()):
        raise ConfigError(f"rollout.engine.extra may not set {', '.join(refused)}; Penstock sets it")
    if config.keep_kv_cache and config.extra.get("disable_overlap_schedule") is False:
        raise ConfigError(
            "the overlap scheduler stamps a token of the old weights as new when the KV cache is kept; "
            "remove disable_overlap_schedule from extra, or set rollout.engine.keep_kv_cache to false"
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
    """Return whether SGLang uses the seed of a request. It does so only with deterministic inference."""
    return config.extra.get("enable_deterministic_inference") is not False


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


class SglangChild:
    """SGLang's server and its own child processes: one process group, which ends with this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str], api_key: str, environment: Mapping[str, str]
    ) -> SglangChild:
        """Start the server. It inherits stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock_rollout.engines.sglang.child", str(os.getpid()), module, *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(api_key) | dict(environment),
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.returncode

    def stopped_process(self) -> int | None:
        """The id of a process of SGLang that a signal has stopped (state T), or None."""
        return next((pid for pid in _with_descendants(self.pid) if _state(pid) == "T"), None)

    async def end(self) -> None:
        """Terminate the server, then kill what is left of its process group. A stopped process has to continue to
        end."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
                os.killpg(self.pid, signal.SIGCONT)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


def _state(pid: int) -> str:
    """The state of a process as Linux' /proc has it; empty if it is gone, or on another system."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _with_descendants(pid: int) -> Iterator[int]:
    """A process and its descendants, parents first."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _with_descendants(int(child))


def _environment(api_key: str) -> dict[str, str]:
    """Return our environment plus SGLang's settings. This process's own environment stays unchanged.

    SGLANG_RETURN_ORIGINAL_LOGPROB=0 selects the log-probs of the sampled distribution, which the engine promises."""
    return {
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        API_KEY_VARIABLE: api_key,
    }
