"""Signs of life of the parts of a run that are not rollout servers, and how often each part was started.

Kept in Redis, by its clock. A rollout server's heartbeat is its record in the fleet (penstock.store.fleet); only its
starts are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio as redis

from penstock.cancellation import end_task
from penstock.errors import QueueFull, Unavailable
from penstock.replay.redis_queue import key_prefix
from penstock.store.redis_errors import guarded

logger = logging.getLogger(__name__)
BEAT_S = 1.0
LEARNER = "learner"

# Both begin with a delete, which a full Redis lets through.
_BEAT = """
redis.call('HDEL', KEYS[1], '')
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local last = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], now)
return last and now - last or -1
"""
_START = "redis.call('HDEL', KEYS[1], '') return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)"


class Heartbeats:
    """Of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self._beats = f"{key_prefix(run)}heartbeats"
        self._starts = f"{key_prefix(run)}starts"

    async def beat(self, component: str) -> float | None:
        """Say that `component` lives. Returns the seconds since it, or its predecessor, last did; None if it never did
        or ended in order."""
        silence_ms = int(await guarded(self.client.eval(_BEAT, 1, self._beats, component)))
        return None if silence_ms < 0 else silence_ms / 1000

    async def end(self, component: str) -> None:
        """It ends in order: its silence from now on means nothing."""
        await guarded(self.client.hdel(self._beats, component))

    async def ages_s(self) -> dict[str, float]:
        """Seconds since the last sign of life, by component."""
        beats = await guarded(self.client.hgetall(self._beats))
        seconds, microseconds = await guarded(self.client.time())
        now_s = int(seconds) + int(microseconds) / 1e6
        return {component.decode(): max(0.0, now_s - int(at_ms) / 1000) for component, at_ms in beats.items()}

    async def count_start(self, component: str) -> None:
        await guarded(self.client.eval(_START, 1, self._starts, component))

    async def restarts(self) -> dict[str, int]:
        """Starts after the first, by component."""
        starts = await guarded(self.client.hgetall(self._starts))
        return {component.decode(): int(count) - 1 for component, count in starts.items()}

    @contextlib.asynccontextmanager
    async def beating(self, component: str) -> AsyncIterator[float | None]:
        """Beat until the block is left, and say so if that was in order. Yields what the first beat returned."""
        await self.count_start(component)
        silence_s = await self.beat(component)
        task = asyncio.create_task(self._beat_loop(component))
        try:
            yield silence_s
        finally:
            await end_task(task)
        await self.end(component)

    async def _beat_loop(self, component: str) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.beat(component)
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot say that the %s lives: %s", component, error)
