"""The run that a gateway serves: its part of Redis, the handlers of its resources, and the gateway's own probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from penstock.api.records import Record
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import RunStores
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.replay.queue import RedisReplayQueue
from penstock.samples import TokenText
from penstock.sessions.session_store import SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.redis_client import RedisClient, check_primary
from penstock.tracing import Tracing
from penstock_services.gateway import problems
from penstock_services.gateway.access import Access
from penstock_services.gateway.datasets import DatasetHandlers
from penstock_services.gateway.generate import GenerateHandlers
from penstock_services.gateway.groups import GroupHandlers, GroupReader
from penstock_services.gateway.metrics import GatewayMetrics, RunSnapshot
from penstock_services.gateway.openapi import PageHandlers
from penstock_services.gateway.operations import Operation, ServedOperation, declared_by, http_operation
from penstock_services.gateway.policies import PolicyHandlers
from penstock_services.gateway.prompts import PromptHandlers
from penstock_services.gateway.rest import HttpRequest
from penstock_services.gateway.runs import RunHandlers
from penstock_services.gateway.server_choice import ServerChoice
from penstock_services.gateway.sessions.handlers import SessionHandlers, TaskHandlers
from penstock_services.gateway.sessions.recorder import SessionRecorder
from penstock_services.gateway.sessions.rewards import SessionRewards

logger = logging.getLogger(__name__)
T = TypeVar("T")
READY_TIMEOUT_S = 2.0
KEYS_WARNING = "gateway.keys_file or gateway.api_key_file cannot be used; the gateway's log says why"
"""Probes need no key, so they do not show the path of the file."""


@dataclass(frozen=True)
class ServedRun:
    """Bundles the objects of one run. Handlers know neither this bundle nor each other."""

    config: RunConfig
    client: RedisClient
    stopping: asyncio.Event
    """Set when the gateway stops: streams end."""
    stores: RunStores
    prompts: PromptHandlers
    groups: GroupHandlers
    policies: PolicyHandlers
    lifecycle: RunHandlers
    datasets: DatasetHandlers
    generation: GenerateHandlers
    sessions: SessionHandlers
    tasks: TaskHandlers

    @classmethod
    def create(
        cls, client: RedisClient, streams: RedisClient, config: RunConfig, tracing: Tracing | None = None
    ) -> ServedRun:
        """Reads the tokenizer's file, so call it in a thread. Streams and long waits read over `streams`, so that they
        cannot take the connections of other requests."""
        stopping = asyncio.Event()
        stores = RunStores.of(client, config)
        queue, fleet, registry, control = stores.queue, stores.fleet, stores.policies, stores.control
        texts = TokenText.load(config.model.path)
        sessions = SessionStore(client, config.run, config.gateway.session_ttl_s, config.gateway.sessions)
        tasks = TaskStore(client, config.run, config.gateway.session_ttl_s, config.gateway.sessions)
        recorder, rewards = SessionRecorder(sessions), SessionRewards(config, queue, sessions, tasks)
        watched = GroupReader(config.run, RedisReplayQueue(streams, config.run, config.replay), texts)
        return cls(
            config=config, client=client, stopping=stopping, stores=stores,
            prompts=PromptHandlers(config, queue, watched, stopping, tracing or Tracing()),
            groups=GroupHandlers(config, GroupReader(config.run, queue, texts)),
            policies=PolicyHandlers(config, registry, fleet, control, stopping),
            lifecycle=RunHandlers(config, stores), datasets=DatasetHandlers(config, queue),
            generation=GenerateHandlers(config, ServerChoice(config, fleet, registry, control), recorder, texts),
            sessions=SessionHandlers(config, recorder, rewards, texts),
            tasks=TaskHandlers(config, tasks, queue, control),
        )  # fmt: skip

    async def close(self) -> None:
        await self.prompts.feed.close()
        await self.policies.current.close()
        await self.generation.close()

    async def check_ready(self) -> None:
        """Raise Unavailable unless Redis answers at once, is a primary, and the gateway is not stopping."""
        if self.stopping.is_set():
            raise Unavailable("the gateway is stopping; use another one")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await check_primary(self.client)
        except (TimeoutError, ConfigError) as error:
            raise Unavailable(str(error) or "Redis does not answer; check that the server runs") from error


class Alive(Record):
    status: str


class Ready(Record):
    status: str
    state: str
    detail: str
    warnings: tuple[str, ...]


class ProbeHandlers:
    """Probes and scrapes, which are answered without a key."""

    def __init__(self, run: ServedRun, metrics: GatewayMetrics, access: Access) -> None:
        self.run = run
        self.metrics = metrics
        self.access = access
        self._check_ready = shared(run.check_ready)
        self._take_snapshot = shared(self._snapshot)

    @http_operation("GET", "/healthz", None, Alive)
    async def healthz(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "alive"})

    @http_operation("GET", "/startupz", None, Alive)
    async def startupz(self, _: HttpRequest) -> Response:
        """A gateway that answers has started."""
        return JSONResponse({"status": "started"})

    @http_operation("GET", "/readyz", None, Ready)
    async def readyz(self, _: HttpRequest) -> Response:
        """Whether the gateway can serve: `state` is `ready`, `draining` while it stops, or `stale` without Redis.
        `warnings` lists what needs an operator but does not stop it from serving."""
        try:
            await self._check_ready()
        except Unavailable as error:
            state = "draining" if self.run.stopping.is_set() else "stale"
            return problems.from_error(error, state=state)
        self.access.refresh()
        warnings = [KEYS_WARNING] if self.access.problems else []
        return JSONResponse({"status": "ready", "state": "ready", "detail": "", "warnings": warnings})

    @http_operation("GET", "/metrics", None, "text/plain")
    async def scrape(self, _: HttpRequest) -> Response:
        """Metrics. The gateway's own are there even when Redis does not answer."""
        snapshot = await self._take_snapshot()
        self.access.refresh()
        self.metrics.keys.set(len(self.access.keys))
        self.metrics.broken_key_files.set(len(self.access.problems))
        return Response(self.metrics.render(snapshot), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _snapshot(self) -> RunSnapshot | None:
        sessions, run = self.metrics.sessions, self.run
        sessions.stat = None
        sessions.traffic, sessions.cached_bytes = run.generation.traffic, run.generation.recorder.cached_bytes
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                sessions.stat = await run.tasks.tasks.stat()
                return await RunSnapshot.take(run.stores, run.config)
        except (PenstockError, RedisError, TimeoutError) as error:
            logger.warning("scraped without the run's metrics: %s", error)
            return None


HANDLERS = (
    PromptHandlers, GroupHandlers, PolicyHandlers, RunHandlers, DatasetHandlers, GenerateHandlers, SessionHandlers,
    TaskHandlers, ProbeHandlers, PageHandlers,
)  # fmt: skip
OPERATIONS: tuple[Operation, ...] = tuple(declared_by(HANDLERS))
"""Every operation of a gateway."""


def serve_operations(run: ServedRun, metrics: GatewayMetrics, access: Access) -> list[ServedOperation]:
    """All operations, each with the object that answers it."""
    owners = {type(owner): owner for owner in vars(run).values()}
    owners |= {ProbeHandlers: ProbeHandlers(run, metrics, access), PageHandlers: PageHandlers(OPERATIONS)}
    return [ServedOperation(found, owners[kind]) for kind in HANDLERS for found in declared_by([kind])]


def shared(call: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Awaitable[T]]:
    """A function that awaits `call`. Callers at the same time share one call, so that requests without a key, however
    many there are, use one connection to Redis."""
    running: asyncio.Task[T] | None = None

    async def join() -> T:
        nonlocal running
        if running is None or running.done():
            running = asyncio.create_task(call())
        return await asyncio.shield(running)

    return join
