"""One SGLang server: the child process, the calls to it, its load, and whether it is alive."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.cancellation import end_task
from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, Unavailable
from penstock_rollout.engines.sglang.calls import SglangCalls
from penstock_rollout.engines.sglang.child import API_KEY_VARIABLE

logger = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 21)
"""Oldest SGLang that works. 0.5.19 is the first that reports which policy version produced which token. Up to 0.5.20,
the scheduler dies if a load flushes the cache while retracted requests wait, which the engine does
to drop the KV cache."""
READY_POLL_S = 0.2
LOAD_POLL_S = 0.5
MAX_SILENT_POLLS = 3
"""Number of polls in a row without an answer, or with a stopped process, after which the server counts as hung."""


class SglangServer:
    """Can be started once and stopped once. Calls `on_loss` once with the reason if the server dies or hangs."""

    def __init__(
        self, module: str, arguments: Sequence[str], port: int, on_loss: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.load = (0, 0.0)
        """Waiting requests and usage of the KV cache, as of the last poll."""
        self._module = module
        self._arguments = arguments
        self._on_loss = on_loss
        self._environment = environment
        self._api_key = secrets.token_urlsafe(32)
        self.calls = SglangCalls(port, self._api_key)
        self._metrics = SglangMetrics(port)
        self._process: asyncio.subprocess.Process | None = None
        self._is_lost = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether SGLang runs and does not count as hung."""
        return self._process is not None and self._process.returncode is None and not self._is_lost

    async def start(self) -> None:
        """Start the server and wait until it can generate. The caller sets the deadline; large models take minutes. It
        inherits stdout and stderr. It and its child processes are one process group, which ends with this process."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock_rollout.engines.sglang.child", str(os.getpid()), self._module,
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            # The promised log-probs are those of the sampled distribution.
            env={
                "HF_HUB_OFFLINE": "1", **os.environ, "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
                API_KEY_VARIABLE: self._api_key, **self._environment,
            },
        )  # fmt: skip
        while not await self.calls.is_ready():
            if process.returncode is not None:
                raise Unavailable(f"SGLang ended with code {process.returncode} while it started; its output says why")
            await asyncio.sleep(READY_POLL_S)
        version = await self.calls.version()
        if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION))
            raise ConfigError(f"SGLang {version} cannot take new weights while requests run; install {oldest} or newer")
        REGISTRY.register(self._metrics)
        self._watching = asyncio.create_task(self._watch(process), name="watch-sglang")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait until SGLang ends, answers nothing, or one of its processes is stopped. Its HTTP process answers even if
        a scheduler is stopped."""
        num_silent, reason = 0, ""
        while process.returncode is None and num_silent < MAX_SILENT_POLLS:
            try:
                if (stopped := _stopped_process(process.pid)) is None:
                    self.load = await self.calls.load()
                    num_silent = 0
                else:
                    num_silent, reason = num_silent + 1, f"its process {stopped} is stopped (SIGSTOP)"
            except Unavailable as error:
                num_silent, reason = num_silent + 1, "SGLang does not answer"
                logger.warning("%s", error)
            await asyncio.sleep(LOAD_POLL_S)
        if process.returncode is not None:
            reason = f"SGLang ended with code {process.returncode}"
        self._is_lost = True
        self._on_loss(reason)

    async def stop(self) -> None:
        """End the process and then what is left of its group. Connections are closed first, because SGLang waits for
        them. A stopped process has to continue to end."""
        if self._watching is not None:
            await end_task(self._watching)
            REGISTRY.unregister(self._metrics)
        await self.calls.close()
        if (process := self._process) is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
                os.killpg(process.pid, signal.SIGCONT)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _stopped_process(pid: int) -> int | None:
    """The id of a process of SGLang that a signal has stopped, or None."""
    with suppress(psutil.Error):
        server = psutil.Process(pid)
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                if process.status() == psutil.STATUS_STOPPED:
                    return int(process.pid)
    return None


SCRAPE_TIMEOUT_S = 2.0
PREFIX = "sglang:"


class SglangMetrics(Collector):
    """Fetches SGLang's metrics on each scrape, in the thread that serves /metrics. Yields none while SGLang is down."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def describe(self) -> list[Metric]:
        """Return nothing. Otherwise registering would call `collect` before the server runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            response = httpx.get(self._url, timeout=SCRAPE_TIMEOUT_S, follow_redirects=True, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError:
            return
        for family in text_string_to_metric_families(response.text):
            if family.name.startswith(PREFIX):
                yield family


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
