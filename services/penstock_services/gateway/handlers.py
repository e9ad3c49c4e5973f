"""What the gateway does, whatever the protocol: the handlers of every resource of a run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.created_runs import CreatedRuns
from penstock.store.fleet import Fleet
from penstock.store.heartbeats import Heartbeats
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import RedisClient
from penstock.store.run_control import RunControl
from penstock.tracing import Tracing
from penstock_services.gateway.datasets.handlers import DatasetHandlers
from penstock_services.gateway.generate.handlers import GenerateHandlers
from penstock_services.gateway.generate.sessions import Sessions
from penstock_services.gateway.operations import AuditLog, Operating
from penstock_services.gateway.policies.handlers import PolicyHandlers
from penstock_services.gateway.prompts.handlers import PromptHandlers
from penstock_services.gateway.runs.handlers import RunHandlers
from penstock_services.gateway.served_runs import ServedRuns
from penstock_services.gateway.token_text import TokenText

READY_TIMEOUT_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Handlers:
    config: RunConfig
    queue: RedisReplayQueue
    fleet: Fleet
    heartbeats: Heartbeats
    prompts: PromptHandlers
    policies: PolicyHandlers
    runs: RunHandlers
    generation: GenerateHandlers
    datasets: DatasetHandlers
    texts: TokenText
    served: ServedRuns
    stopping: asyncio.Event
    """Set when the gateway drains: streams end."""

    @classmethod
    async def over(cls, client: RedisClient, config: RunConfig, tracing: Tracing | None = None) -> Handlers:
        """Those of the gateway's own run, from which those of the others are found."""
        audit, stopping = AuditLog(config.folder / "audit.jsonl"), asyncio.Event()
        served = ServedRuns(
            config, CreatedRuns(client), lambda of: cls._of(client, of, Operating(served, audit, stopping), tracing)
        )
        return await served.find(config.run)

    @classmethod
    def _of(cls, client: RedisClient, config: RunConfig, operating: Operating, tracing: Tracing | None) -> Handlers:
        queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
        registry, control = PolicyRegistry(client, config.run), RunControl(client, config.run)
        texts = TokenText.load(config.model.path)
        return cls(
            config,
            queue,
            fleet,
            Heartbeats(client, config.run),
            PromptHandlers(config, operating, queue, texts, tracing),
            PolicyHandlers(config, operating, registry, fleet, control),
            RunHandlers(config, operating, queue, registry, fleet, control),
            GenerateHandlers(config, operating, fleet, registry, control, Sessions(config, queue)),
            DatasetHandlers(config, operating, queue),
            texts,
            operating.served,
            operating.stopping,
        )

    def of_kind(self, kind: type[T]) -> T:
        """The one of these handlers that is of a class."""
        return next(handlers for handlers in vars(self).values() if isinstance(handlers, kind))

    async def check_ready(self) -> None:
        """Raise Unavailable unless Redis answers at once, and the gateway is not about to end."""
        if self.stopping.is_set():
            raise Unavailable("the gateway is stopping; use another one")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ping: Any = self.queue.client.ping()
                await ping
        except (TimeoutError, RedisError) as error:
            raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error
