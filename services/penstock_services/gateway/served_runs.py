"""The runs that a gateway serves: its own, and every run that was created through a gateway on the same Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from penstock.config.run import RunConfig
from penstock.errors import NotFound, Unavailable
from penstock.store.created_runs import CreatedRuns
from penstock.store.redis_client import RedisClient
from penstock.tracing import Tracing
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import AuditLog, bounded, find_guarded
from penstock_services.gateway.served_run import ServedRun

READY_TIMEOUT_S = 2.0
OWN_RUN = ("", "-")
"""Names that stand for the gateway's own run in a path or a request. No run can have them."""


class ServedRuns:
    """Finds a run by its name. REST routes and gRPC services call `find`, then a handler of what it returns.

    A created run is opened when it is first asked for. It stays open: its config never changes."""

    def __init__(
        self, client: RedisClient, config: RunConfig, created: CreatedRuns, open_run: Callable[[RunConfig], ServedRun],
        stopping: asyncio.Event, audit: AuditLog,
    ) -> None:  # fmt: skip
        self.audit = audit
        self.client = client
        self.config = config
        self.created = created
        self.stopping = stopping
        """Set when the gateway stops: streams end."""
        self._open_run = open_run
        self._runs: dict[str, ServedRun] = {}

    @classmethod
    def over(
        cls, client: RedisClient, streams: RedisClient, config: RunConfig, audit: AuditLog,
        tracing: Tracing | None = None,
    ) -> ServedRuns:  # fmt: skip
        """Streams and long waits read over `streams`, so that they cannot take the connections of other requests."""
        created, stopping = CreatedRuns(client), asyncio.Event()
        return cls(
            client,
            config,
            created,
            lambda of: ServedRun.create(client, streams, of, created, audit, stopping, tracing),
            stopping,
            audit,
        )

    @property
    def opened(self) -> list[ServedRun]:
        """The runs that were asked for so far."""
        return list(self._runs.values())

    async def find(self, run: str) -> ServedRun:
        """The run of this name, or the gateway's own run for the names of OWN_RUN."""
        name = self.config.run if run in OWN_RUN else run
        found = self._runs.get(name)
        return found if found is not None else await self._open(name)

    async def find_for(self, caller: Caller, run: str, choose: Callable[[ServedRun], Any]) -> ServedRun:
        """The run of this name, for a call of the handler that `choose` takes from a run. The caller's role is checked
        before the run is looked up."""
        own = await self.find("")
        named = "" if run in OWN_RUN else run
        return await find_guarded(lambda: self.find(named), caller, choose(own), named, self.audit)

    async def _open(self, run: str) -> ServedRun:
        opened = await asyncio.to_thread(self._open_run, await self._config_of(run))
        return self._runs.setdefault(run, opened)

    async def _config_of(self, run: str) -> RunConfig:
        if run == self.config.run:
            return self.config
        created = await bounded(self.created.get(run), 2 * self.config.redis.timeout_s)
        if created is None:
            raise NotFound(
                f"run {run!r} is not served here; this gateway serves {self.config.run!r} and the runs created on its "
                "Redis"
            )
        return created.config_at(self.config)

    async def check_ready(self) -> None:
        """Raise Unavailable unless Redis answers at once and the gateway is not stopping."""
        if self.stopping.is_set():
            raise Unavailable("the gateway is stopping; use another one")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ping: Any = self.client.ping()
                await ping
        except (TimeoutError, RedisError) as error:
            raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()
