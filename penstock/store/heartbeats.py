"""Heartbeats of the parts of a run that are not rollout servers, and how often each part was started.

Times are those of Redis' clock. A rollout server's heartbeat is its record in the fleet (penstock.store.fleet); only
its starts are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import redis.asyncio as redis

from penstock.cancellation import end_task
from penstock.errors import QueueFull, Unavailable
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded
from penstock.store.scripts import STORE

logger = logging.getLogger(__name__)
BEAT_S = 1.0
LEARNER = "learner"
VALIDATOR = "validator"
"""The part of the feed that validates."""


class Heartbeats:
    """Heartbeats and starts of the parts of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.run = run
        self.keys = RunKeys(run)

    async def beat(self, component: str) -> float | None:
        """Record that `component` is alive. Returns the seconds since its last beat, which a predecessor may have sent;
        None if there was none, or if the last one ended in order."""
        silence_ms = int(await STORE.call(self.client, self.keys.prefix, "beat", component))
        return None if silence_ms < 0 else silence_ms / 1000

    async def end(self, component: str) -> None:
        """Forget the beats of a component that ends in order, so its silence raises no alarm."""
        await guarded(self.client.hdel(self.keys.heartbeats, component))

    async def ages_s(self) -> dict[str, float]:
        """Seconds since the last beat, by component."""
        beats = await guarded(self.client.hgetall(self.keys.heartbeats))
        seconds, microseconds = await guarded(self.client.time())
        now_s = int(seconds) + int(microseconds) / 1e6
        return {component.decode(): max(0.0, now_s - int(at_ms) / 1000) for component, at_ms in beats.items()}

    async def count_start(self, component: str) -> None:
        await STORE.call(self.client, self.keys.prefix, "count_start", component)

    async def restarts(self) -> dict[str, int]:
        """Starts after the first, by component."""
        starts = await guarded(self.client.hgetall(self.keys.starts))
        return {component.decode(): int(count) - 1 for component, count in starts.items()}

    @contextlib.asynccontextmanager
    async def beating(self, component: str) -> AsyncIterator[float | None]:
        """Beat once a second inside the block, and call `end` if the block ends without an error. Yields what the first
        beat returned."""
        await self.count_start(component)
        silence_s = await self.beat(component)
        task = asyncio.create_task(self._beat_loop(component))
        try:
            yield silence_s
        finally:
            await end_task(task)
        await self.end(component)

    @contextlib.contextmanager
    def beating_in_thread(self, component: str, connect: Callable[[], redis.Redis]) -> Iterator[None]:
        """Beat from a thread, with a connection of its own, while the block keeps the event loop busy."""
        stop = threading.Event()

        async def beat() -> None:
            client = connect()
            task = asyncio.create_task(Heartbeats(client, self.run)._beat_loop(component))
            try:
                await asyncio.to_thread(stop.wait)
            finally:
                await end_task(task)
                await client.aclose()

        thread = threading.Thread(target=lambda: asyncio.run(beat()), name=f"heartbeat of {component}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    async def _beat_loop(self, component: str) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.beat(component)
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot send the heartbeat of the %s: %s", component, error)
