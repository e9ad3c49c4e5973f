"""Rollout servers whose engine answers every request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig
from penstock.store.fleet import Fleet, ServerRecord
from penstock.trajectory import VersionSegment
from penstock.v1 import generate_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization
from scripted_engine import END, spelled

ANSWER = (*spelled("abc ok"), END)
"""Encoding its text gives other ids."""


@dataclass
class TalkingEngine:
    """Says ANSWER. The log-probs of all tokens differ."""

    policy_version: int = 3
    name: str = "talking"
    requests: list[GenerateRequest] = field(default_factory=list)
    sampled: list[tuple[float, ...]] = field(default_factory=list)
    """The log-probs of each answer."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        first = sum(map(len, self.sampled))
        log_probs = tuple(-(first + place + 1) / 1024 for place in range(len(ANSWER)))
        self.sampled.append(log_probs)
        yield TokenChunk(ANSWER, log_probs, (VersionSegment(0, len(ANSWER), self.policy_version),), "stop")


@asynccontextmanager
async def serving(
    config: RunConfig, client: Any, folder: Path, engines: Mapping[str, Any], *, heartbeats: bool = False
) -> AsyncIterator[None]:
    """Serve with these engines, by server id."""
    fleet, tokenization = Fleet(client, config.run), Tokenization(folder)
    records = []
    async with AsyncExitStack() as stack:
        for server_id, engine in engines.items():
            server = make_listener(ClusterKey.of(config))
            service = GenerateService(config.run, server_id, engine, tokenization, 4096)
            generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            records.append(ServerRecord(server_id, f"127.0.0.1:{port}", engine.name, policy_version=3))
            await fleet.join(records[-1])
            await fleet.set_state(server_id, "READY")
        if heartbeats:
            beating = asyncio.create_task(_beat(fleet, records))
            stack.callback(beating.cancel)
        yield


async def _beat(fleet: Fleet, records: Sequence[ServerRecord]) -> None:
    while True:
        await asyncio.sleep(2)
        for record in records:
            await fleet.report(record)
