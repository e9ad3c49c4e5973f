"""The current policy of a run as it changes: one task reads it for everyone who watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.errors import NotFound, PenstockError
from penstock.v1 import policies_pb2
from penstock_services.gateway.operations import bounded

POLL_S = 0.25
"""Pause between two reads. A blocking read would miss changes, because the answer also depends on marks, on the servers
and on the age of their heartbeats."""


class CurrentPolicy:
    """Follows the current policy. A single task polls it while anybody watches."""

    def __init__(
        self, read: Callable[[], Awaitable[policies_pb2.Policy]], deadline_s: float, stopping: asyncio.Event
    ) -> None:
        self.read = read
        self.deadline_s = deadline_s
        self.stopping = stopping
        self._watchers: set[asyncio.Event] = set()
        self._poller: asyncio.Task[None] | None = None
        self._policy = b""
        """Serialized; empty while no version is published."""
        self._error: PenstockError | None = None

    async def changes(self) -> AsyncIterator[policies_pb2.Policy]:
        """Yield the current policy, and again whenever anything about it changes, until the gateway stops."""
        seen, woken = b"", asyncio.Event()
        self._watchers.add(woken)
        try:
            while not self.stopping.is_set():
                woken.clear()
                self._start_poller()
                if self._policy not in (b"", seen):
                    seen = self._policy
                    yield policies_pb2.Policy.FromString(seen)
                await woken.wait()
                if self._error is not None:
                    raise self._error
        finally:
            self._watchers.discard(woken)

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller

    def _start_poller(self) -> None:
        if self._poller is None:
            self._policy, self._error = b"", None
            self._poller = asyncio.create_task(self._poll(), name="current policy")

    async def _poll(self) -> None:
        try:
            while self._watchers and not self.stopping.is_set():
                policy = await self._read()
                if policy != self._policy:
                    self._policy = policy
                    self._wake()
                await asyncio.sleep(POLL_S)
        except PenstockError as error:
            self._error = error
        finally:
            self._poller = None
            self._wake()

    async def _read(self) -> bytes:
        with contextlib.suppress(NotFound):
            policy = await bounded(self.read(), self.deadline_s)
            return policy.SerializeToString(deterministic=True)
        return b""

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()
