"""The run that a gateway serves, found by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from penstock.config.run import RunConfig
from penstock.errors import NotFound, Unavailable
from penstock.store.redis_client import RedisClient
from penstock.tracing import Tracing
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import AuditLog, find_guarded
from penstock_services.gateway.served_run import ServedRun

READY_TIMEOUT_S = 2.0
OWN_RUN = ("", "-")
"""Names that stand for the gateway's own run in a path or a request. No run can have them."""


class ServedRuns:
    """Finds the gateway's run by its name. REST routes and gRPC services call `find`, then a handler of the run."""

    def __init__(self, client: RedisClient, run: ServedRun, stopping: asyncio.Event, audit: AuditLog) -> None:
        self.client = client
        self.run = run
        self.config = run.config
        self.stopping = stopping
        """Set when the gateway stops: streams end."""
        self.audit = audit

    @classmethod
    def over(
        cls, client: RedisClient, streams: RedisClient, config: RunConfig, audit: AuditLog,
        tracing: Tracing | None = None,
    ) -> ServedRuns:  # fmt: skip
        """Streams and long waits read over `streams`, so that they cannot take the connections of other requests."""
        stopping = asyncio.Event()
        return cls(client, ServedRun.create(client, streams, config, audit, stopping, tracing), stopping, audit)

    async def find(self, run: str) -> ServedRun:
        """The run, if it has this name or the name is one of OWN_RUN."""
        if run != self.config.run and run not in OWN_RUN:
            raise NotFound(f"run {run!r} is not served here; this gateway serves {self.config.run!r}")
        return self.run

    async def find_for(self, caller: Caller, run: str, choose: Callable[[ServedRun], Any]) -> ServedRun:
        """The run of this name, for a call of the handler that `choose` takes from a run. The caller's role is checked
        before the name."""
        named = "" if run in OWN_RUN else run
        return await find_guarded(lambda: self.find(named), caller, choose(self.run), named, self.audit)

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
        await self.run.close()
