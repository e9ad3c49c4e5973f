"""What the gateway does, whatever the protocol: the handlers of every resource of one run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock.fleet import Fleet
from penstock.heartbeats import Heartbeats
from penstock.policies import PolicyRegistry
from penstock.redis_client import RedisClient
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.run_control import RunControl
from penstock.tracing import Tracing
from penstock_services.gateway.dataset_handlers import DatasetHandlers
from penstock_services.gateway.generate_handlers import GenerateHandlers
from penstock_services.gateway.operations import AuditLog
from penstock_services.gateway.policy_handlers import PolicyHandlers
from penstock_services.gateway.prompt_handlers import PromptHandlers
from penstock_services.gateway.run_handlers import RunHandlers
from penstock_services.gateway.sessions import Sessions
from penstock_services.gateway.token_text import TokenText

READY_TIMEOUT_S = 2.0


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
    stopping: asyncio.Event
    """Set when the gateway drains: streams end."""

    @classmethod
    def over(cls, client: RedisClient, config: RunConfig, tracing: Tracing | None = None) -> Handlers:
        queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
        registry, control = PolicyRegistry(client, config.run), RunControl(client, config.run)
        audit, stopping = AuditLog(config.folder / "audit.jsonl"), asyncio.Event()
        texts = TokenText.load(config.model.path)
        return cls(
            config,
            queue,
            fleet,
            Heartbeats(client, config.run),
            PromptHandlers(config, queue, audit, texts, stopping, tracing),
            PolicyHandlers(config, registry, fleet, control, audit, stopping),
            RunHandlers(config, queue, registry, fleet, control, audit),
            GenerateHandlers(config, fleet, registry, control, Sessions(config, queue), audit),
            DatasetHandlers(config, queue, audit),
            texts,
            stopping,
        )

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
