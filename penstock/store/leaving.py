"""Processes that are stopping and still need Redis.

A process that gets SIGTERM finishes its work: a learner writes a checkpoint and commits its groups, a rollout server
gives prompts back. If Redis is stopped at the same moment, as by `helm uninstall`, it has to leave last. So a stopping
process says once a second that it is still there, and removes its name when it needs Redis no longer.
deploy/redis/wait-for-clients.sh waits for the names before Redis is stopped. A process that was killed while it was
stopping leaves its name behind; a name that is older than 30 s does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio as redis

from penstock.cancellation import end_task
from penstock.errors import PenstockError
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded

logger = logging.getLogger(__name__)
SIGN_S = 1.0


class Leaving:
    """The name of one stopping process in Redis. It is written while `holding` is open, once `stopping` is set."""

    def __init__(self, client: redis.Redis, run: str, component: str) -> None:
        self.client: Any = client
        self.key = RunKeys(run).leaving
        self.name = f"{component}@{socket.gethostname()}:{os.getpid()}"

    @contextlib.asynccontextmanager
    async def holding(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Keep Redis from being stopped between the moment `stopping` is set and the end of the block."""
        task = asyncio.create_task(self._sign_loop(stopping))
        try:
            yield
        finally:
            await end_task(task)
            if stopping.is_set():
                with contextlib.suppress(PenstockError):
                    await guarded(self.client.zrem(self.key, self.name))

    async def _sign_loop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        while True:
            try:
                seconds, microseconds = await guarded(self.client.time())
                now_ms = int(seconds) * 1000 + int(microseconds) // 1000
                await guarded(self.client.zadd(self.key, {self.name: now_ms}))
            except PenstockError as error:
                logger.warning("cannot tell Redis that this process is stopping: %s", error)
            await asyncio.sleep(SIGN_S)
