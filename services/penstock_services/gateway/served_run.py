"""One run that the gateway serves: its part of Redis, and the handlers of its resources."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from penstock.config.run import RunConfig
from penstock.diagnosis.facts import RunStores
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.sessions.session_store import SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.redis_client import RedisClient
from penstock.token_text import TokenText
from penstock.tracing import Tracing
from penstock_services.gateway.datasets.handlers import DatasetHandlers
from penstock_services.gateway.generate.handlers import GenerateHandlers
from penstock_services.gateway.generate.server_choice import ServerChoice
from penstock_services.gateway.operations import AuditLog
from penstock_services.gateway.policies.handlers import PolicyHandlers
from penstock_services.gateway.prompts.groups import GroupHandlers, GroupReader
from penstock_services.gateway.prompts.handlers import PromptHandlers
from penstock_services.gateway.prompts.samples import SampleHandlers
from penstock_services.gateway.runs.dead_letters import DeadLetterHandlers
from penstock_services.gateway.runs.evaluations import EvaluationHandlers
from penstock_services.gateway.runs.handlers import RunHandlers
from penstock_services.gateway.runs.servers import ServerHandlers
from penstock_services.gateway.sessions.recorder import SessionRecorder
from penstock_services.gateway.sessions.rewards import SessionRewards
from penstock_services.gateway.sessions.session_handlers import SessionHandlers
from penstock_services.gateway.sessions.task_handlers import TaskHandlers


@dataclass(frozen=True)
class ServedRun:
    """Bundles the objects of one run. Handlers know neither this bundle nor each other."""

    config: RunConfig
    stores: RunStores
    texts: TokenText
    prompts: PromptHandlers
    groups: GroupHandlers
    samples: SampleHandlers
    policies: PolicyHandlers
    lifecycle: RunHandlers
    servers: ServerHandlers
    evaluations: EvaluationHandlers
    dead_letters: DeadLetterHandlers
    datasets: DatasetHandlers
    generation: GenerateHandlers
    sessions: SessionHandlers
    tasks: TaskHandlers

    def operation(self, name: str) -> Any:
        """The handler of this name. Every REST route of a run has the name of its handler."""
        found = (getattr(part, name, None) for part in vars(self).values())
        return next(handler for handler in found if hasattr(handler, "role"))

    @property
    def name(self) -> str:
        return self.config.run

    @classmethod
    def create(
        cls, client: RedisClient, streams: RedisClient, config: RunConfig, audit: AuditLog,
        stopping: asyncio.Event, tracing: Tracing | None = None,
    ) -> ServedRun:  # fmt: skip
        """Reads the tokenizer's file, so call it in a thread. `stopping` ends the streams of the handlers."""
        stores = RunStores.of(client, config)
        queue, fleet, registry, control = stores.queue, stores.fleet, stores.policies, stores.control
        texts = TokenText.load(config.model.path)
        groups, servers = GroupReader(config.run, queue, texts), ServerHandlers(config, audit, fleet, control)
        sessions = SessionStore(client, config.run, config.gateway.session_ttl_s, config.gateway.sessions)
        tasks = TaskStore(client, config.run, config.gateway.session_ttl_s, config.gateway.sessions)
        watched = GroupReader(config.run, RedisReplayQueue(streams, config.run, config.replay), texts)
        return cls(
            config=config,
            stores=stores,
            texts=texts,
            prompts=PromptHandlers(config, audit, queue, watched, stopping, tracing),
            groups=GroupHandlers(config, audit, groups),
            samples=SampleHandlers(config, audit),
            policies=PolicyHandlers(config, audit, registry, fleet, control, stopping),
            lifecycle=RunHandlers(config, audit, stores),
            servers=servers,
            evaluations=EvaluationHandlers(config, audit, queue),
            dead_letters=DeadLetterHandlers(config, audit, queue),
            datasets=DatasetHandlers(config, audit, queue),
            generation=GenerateHandlers(
                config,
                audit,
                ServerChoice(config, fleet, registry, control),
                SessionRecorder(sessions),
                SessionRewards(config, queue, sessions, tasks),
            ),
            sessions=SessionHandlers(config, audit, sessions, texts),
            tasks=TaskHandlers(config, audit, tasks, queue, control),
        )

    async def close(self) -> None:
        await self.prompts.feed.close()
        await self.policies.current.close()
        await self.generation.close()
