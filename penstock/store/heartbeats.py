"""Heartbeats of the parts of a run that are not rollout servers, and how often each part was started.

Times are those of Redis' clock. A rollout server's heartbeat is its record in the fleet (penstock.store.fleet); only
its starts are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import redis.asyncio as redis

from penstock.cancellation import end_task
from penstock.errors import PenstockError, QueueFull, Unavailable
from penstock.store.redis_client import RunRecords, guarded
from penstock.store.reports import Phase

logger = logging.getLogger(__name__)
BEAT_S = 1.0
LEARNER = "learner"
VALIDATOR = "validator"
"""The part of the feed that validates."""


class Heartbeats(RunRecords):
    """Heartbeats and starts of the parts of one run."""

    async def beat(self, component: str) -> float | None:
        """Record that `component` is alive. Returns the seconds since its last beat, which a predecessor may have sent;
        None if there was none, or if the last one ended in order."""
        silence_ms = int(await self.call("beat", component))
        return None if silence_ms < 0 else silence_ms / 1000

    async def end(self, component: str) -> None:
        """Forget the beats of a component that ends in order, so its silence raises no alarm."""
        await guarded(self.client.hdel(self.keys.heartbeats, component))

    async def ages_s(self) -> dict[str, float]:
        beats, now_ms = await self.hash_of(self.keys.heartbeats), await self.now_ms()
        return {component: max(0, now_ms - int(at_ms)) / 1000 for component, at_ms in beats.items()}

    async def count_start(self, component: str) -> None:
        await self.call("count_start", component)

    async def restarts(self) -> dict[str, int]:
        """Starts after the first, by component."""
        return {component: int(count) - 1 for component, count in (await self.hash_of(self.keys.starts)).items()}

    @contextlib.asynccontextmanager
    async def beating(self, component: str) -> AsyncIterator[float | None]:
        """Beat once a second inside the block, and `end` unless it raises an error. Yields what the first beat gave."""
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
        """Beat from a thread, with a separate connection, while the block keeps the event loop busy."""
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


MAX_PHASES = 16
"""The newest phases of a part that are kept."""


class Phases(RunRecords):
    """The phases of all parts of one run."""

    newest = ""
    """The phase that this process has entered last."""

    async def enter(self, component: str, phase: str, *, is_first: bool = False) -> None:
        """Record that `component` has begun `phase`. The first phase of a process removes those of the process before
        it. If Redis does not answer or refuses the phase, it is only logged: a start does not fail because of this."""
        phase = phase.encode("utf-8", "replace").decode()  # it may name a path, which need not be UTF-8
        self.newest = phase
        logger.info("%s", phase)
        try:
            await self.call("enter_phase", component, phase, int(is_first), MAX_PHASES)
        except PenstockError as error:
            logger.warning("cannot record the phase: %s", error)

    async def age_s(self, phase: Phase) -> float:
        return (await self.now_ms() - phase.entered_at_ms) / 1000

    async def by_component(self) -> dict[str, list[Phase]]:
        """The newest phases of each part, oldest first."""
        records = await self.hash_of(self.keys.phases)
        return {part: [Phase(name, int(at_ms)) for name, at_ms in json.loads(text)] for part, text in records.items()}


class Leaving(RunRecords):
    """The name of one stopping process in Redis, written once a second while `holding` is open and `stopping` is set.

    A process that gets SIGTERM still commits groups or gives prompts back. If Redis is stopped at the same moment, as
    by `helm uninstall`, it has to leave last: deploy/redis/wait-for-clients.sh waits for the names. A name that is
    older than 30 s, of a process that was killed, does not count."""

    def __init__(self, client: redis.Redis, run: str, component: str) -> None:
        super().__init__(client, run)
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
                    await guarded(self.client.zrem(self.keys.leaving, self.name))

    async def _sign_loop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        while True:
            try:
                await guarded(self.client.zadd(self.keys.leaving, {self.name: await self.now_ms()}))
            except PenstockError as error:
                logger.warning("cannot tell Redis that this process is stopping: %s", error)
            await asyncio.sleep(BEAT_S)
