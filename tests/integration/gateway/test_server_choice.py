"""Which server answers a generate call, on a real Redis, with a fleet larger than the gateway compares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import redis.asyncio as redis

from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import ReplayConfig
from penstock.errors import ModelNotFound, Unavailable
from penstock.store.fleet import Fleet, PolicyRegistry, RunControl, ServerRecord
from penstock.v1 import generate_pb2
from penstock_services.gateway.server_choice import MAX_COMPARED, MAX_TRIES, MAX_VIEW_AGE_S, ServerChoice

NUM_SERVERS = 8 * MAX_COMPARED
LEASE_TTL_S = 600.0
"""No server of these tests sends heartbeats for as long as a test takes."""


class Choosing:
    """A fleet of READY servers, and the gateway's choice among them."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        config = RunConfig(
            run="test", run_dir=folder, model=ModelConfig(path=folder), replay=ReplayConfig(lease_ttl_s=LEASE_TTL_S)
        )
        self.fleet = Fleet(client, "test")
        self.control = RunControl(client, "test")
        self.policies = PolicyRegistry(client, "test")
        self.choice = ServerChoice(config, self.fleet, self.policies, self.control)
        self.names = [f"server-{number}" for number in range(NUM_SERVERS)]

    async def join(self) -> None:
        for name in self.names:
            await self.report(name, 1)
        await self.fleet.set_states(self.names, "READY")

    async def report(self, name: str, version: int, running_groups: int = 0) -> None:
        record = ServerRecord(name, "127.0.0.1:1", "torch", policy_version=version, running_groups=running_groups)
        await self.fleet.report(record)

    async def first(self, known: tuple[str, ...] = (), version: int | None = None) -> str:
        request = generate_pb2.GenerateRequest(policy_version=version)
        _, servers = await self.choice.choose("key", request, known)
        assert 0 < len(servers) <= MAX_TRIES
        return servers[0].server_id


@pytest.fixture
async def choosing(redis_client: redis.Redis, tmp_path: Path) -> Choosing:
    made = Choosing(redis_client, tmp_path)
    await made.join()
    return made


async def test_the_load_of_a_large_fleet_stays_even(choosing: Choosing) -> None:
    for _ in range(2 * NUM_SERVERS):
        choosing.choice.running[await choosing.first()] += 1
    calls = choosing.choice.running.values()
    assert sum(calls) == 2 * NUM_SERVERS
    assert max(calls) <= 4


async def test_a_server_that_is_drained_quarantined_evicted_or_gone_is_not_chosen_again(choosing: Choosing) -> None:
    """The gateway has just read the fleet, and reads it again soon: each order counts before that."""
    kept, *others = choosing.names
    assert await choosing.first((kept,)) == kept
    await choosing.control.drain(kept)
    assert await choosing.first((kept,)) != kept
    await choosing.control.undrain(kept)
    assert await choosing.first((kept,)) == kept
    await choosing.fleet.set_state(kept, "EVICTED")
    assert await choosing.first((kept,)) != kept
    await choosing.fleet.set_states(others, "STALE")
    await choosing.fleet.set_state(kept, "READY")
    assert await choosing.first() == kept
    await choosing.fleet.leave(kept)
    with pytest.raises(Unavailable, match="no rollout server is ready"):
        await choosing.first()


async def test_a_version_that_was_just_reported_is_found(choosing: Choosing) -> None:
    await choosing.first()
    with pytest.raises(ModelNotFound, match=r"no server serves version 2, only \[1\]"):
        await choosing.first(version=2)
    await choosing.report("server-9", 2)
    assert await choosing.first(version=2) == "server-9"
    assert (await choosing.choice.served_versions())[2] == ["server-9"]


async def test_pinned_servers_answer_only_calls_for_their_version(choosing: Choosing) -> None:
    await choosing.report("server-9", 2)
    await choosing.policies.pin("server-9", 2)
    assert all([await choosing.first(("server-9",)) != "server-9" for _ in range(5)])
    assert await choosing.first(version=2) == "server-9"


async def test_a_session_keeps_the_server_of_the_version_that_it_names(choosing: Choosing) -> None:
    """The newest version that counts is the newest that may answer: also with pins, and when they change."""
    await choosing.report("server-9", 100)
    assert await choosing.first(("server-3",)) != "server-3"  # far behind server-9
    assert await choosing.first(("server-3",), version=1) == "server-3"
    await choosing.policies.pin("server-9", 100)
    assert await choosing.first(("server-3",)) == "server-3"
    await choosing.policies.unpin("server-9")
    assert await choosing.first(("server-3",)) != "server-3"


async def test_a_server_that_died_is_skipped_in_time(redis_client: redis.Redis, tmp_path: Path) -> None:
    """The gateway has read the fleet while the server still counted, and would not read it again that soon."""
    choosing = Choosing(redis_client, tmp_path)
    choosing.names = ["a", "b"]
    await choosing.join()
    record = json.loads(await redis_client.hget(choosing.fleet.keys.servers, "a"))
    last_beat_ms = record["heartbeat_ms"] - int(1000 * (LEASE_TTL_S - MAX_VIEW_AGE_S / 4))
    await redis_client.hset(choosing.fleet.keys.servers, "a", json.dumps(record | {"heartbeat_ms": last_beat_ms}))
    async with asyncio.timeout(100):
        while await choosing.first(("a",)) == "a":
            await choosing.report("b", 1)
            await asyncio.sleep(0.05)
    assert await choosing.first(("a",)) == "b"
    assert [server.server_id for server in (await choosing.choice.view.current()).servers] == ["a", "b"]
