"""One SGLang server: the child process, the calls to it, its load, and whether it is alive."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import REGISTRY

from penstock.cancellation import end_task
from penstock.errors import ConfigError, Unavailable
from penstock_rollout.engines.sglang.calls import Load, SglangCalls
from penstock_rollout.engines.sglang.metrics import SglangMetrics
from penstock_rollout.engines.sglang.start import SglangChild

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
        self,
        module: str,
        arguments: Sequence[str],
        port: int,
        on_loss: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:
        self.load = Load(waiting_requests=0, kv_cache_usage=0.0)
        self._module = module
        self._arguments = arguments
        self._on_loss = on_loss
        self._environment = environment
        self._api_key = secrets.token_urlsafe(32)
        self.calls = SglangCalls(port, self._api_key)
        self._metrics = SglangMetrics(port)
        self._child: SglangChild | None = None
        self._is_lost = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether SGLang runs and has not been given up as hung."""
        return self._child is not None and self._child.exit_code is None and not self._is_lost

    async def start(self) -> None:
        """Start the server and wait until it can generate. The caller sets the deadline; large models take minutes."""
        self._child = child = await SglangChild.start(self._module, self._arguments, self._api_key, self._environment)
        while not await self.calls.is_ready():
            if child.exit_code is not None:
                raise Unavailable(f"SGLang ended with code {child.exit_code} while it started; its output says why")
            await asyncio.sleep(READY_POLL_S)
        _check_version(await self.calls.version())
        REGISTRY.register(self._metrics)
        self._watching = asyncio.create_task(self._watch(child), name="watch-sglang")

    async def _watch(self, child: SglangChild) -> None:
        """Wait until SGLang ends, answers nothing, or one of its processes is stopped. Its HTTP process answers even if
        a scheduler is stopped."""
        num_silent, reason = 0, ""
        while child.exit_code is None and num_silent < MAX_SILENT_POLLS:
            try:
                if (stopped := child.stopped_process()) is None:
                    self.load = await self.calls.load()
                    num_silent = 0
                else:
                    num_silent, reason = num_silent + 1, f"its process {stopped} is stopped (SIGSTOP)"
            except Unavailable as error:
                num_silent, reason = num_silent + 1, "SGLang does not answer"
                logger.warning("%s", error)
            await asyncio.sleep(LOAD_POLL_S)
        if child.exit_code is not None:
            reason = f"SGLang ended with code {child.exit_code}"
        self._is_lost = True
        self._on_loss(reason)

    async def stop(self) -> None:
        """End the child process and its children. Connections are closed first, because SGLang waits for them."""
        if self._watching is not None:
            await end_task(self._watching)
            REGISTRY.unregister(self._metrics)
        await self.calls.close()
        if self._child is not None:
            await self._child.end()


def _check_version(version: str) -> None:
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if found < OLDEST_VERSION:
        oldest = ".".join(str(number) for number in OLDEST_VERSION)
        raise ConfigError(f"SGLang {version} cannot take new weights while requests run; install {oldest} or newer")
