"""A rolling upgrade: records of newer and older peers are read, and a change keeps fields that it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis.asyncio as redis

from penstock.config.run import ModelConfig, RunConfig
from penstock.records import read_known_fields
from penstock.store.created_runs import CreatedRuns
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.keys import CreatedRunsKeys, RunKeys
from penstock.store.policies import PolicyRegistry
from penstock.v1 import policies_pb2

KEYS = RunKeys("test")


async def test_servers_of_other_versions_are_listed(redis_client: redis.Redis) -> None:
    fleet = Fleet(redis_client, "test")
    await fleet.join(ServerRecord("now", "127.0.0.1:1", "torch", policy_version=3, devices=("cpu", "cpu")))
    record = json.loads(await redis_client.hget(KEYS.servers, "now"))
    newer = record | {"server_id": "newer", "num_expert_parallel": 8}
    older = {name: value for name, value in record.items() if name not in ("devices", "transports", "host_id")}
    await redis_client.hset(KEYS.servers, "newer", json.dumps(newer))
    await redis_client.hset(KEYS.servers, "older", json.dumps(older | {"server_id": "older"}))
    servers = {server.server_id: server for server in await fleet.servers()}
    assert servers["newer"].devices == ("cpu", "cpu") and servers["newer"].policy_version == 3
    assert servers["older"].devices == ("cpu",) and servers["older"].transports == ("gloo", "snapshot")


async def test_a_created_run_of_another_version_is_read_and_moved(redis_client: redis.Redis) -> None:
    created = CreatedRuns(redis_client)
    run = await created.create(RunConfig(run="mixed", model=ModelConfig(path=Path("m"))))
    newer = json.loads(run.stored) | {"owner": "alice"}
    await redis_client.hset(CreatedRunsKeys.created, "mixed", json.dumps(newer))
    found = await created.get("mixed")
    assert found == run
    moved = await created.move(found, "STARTED", launcher_id="l0")
    assert moved is not None and moved.state == "STARTED"
    stored = json.loads(await redis_client.hget(CreatedRunsKeys.created, "mixed"))
    assert (stored["owner"], stored["state"], stored["launcher_id"]) == ("alice", "STARTED", "l0")
    assert await created.move(found, "FAILED") is None, "the record has changed since it was read"

    older = {"run": "older", "config": newer["config"]}
    await redis_client.hset(CreatedRunsKeys.created, "older", json.dumps(older))
    assert [record.run for record in await created.list()] == ["mixed", "older"]
    assert [record.state for record in await created.list()] == ["STARTED", "CREATED"]


async def test_a_policy_with_an_unknown_field_is_read(redis_client: redis.Redis) -> None:
    unknown_field = bytes([0xFA, 0x7F, 1]) + b"x"  # number 2047, one byte of text
    record = policies_pb2.Policy(policy_version=4, step=2).SerializeToString() + unknown_field
    await redis_client.hset(KEYS.policies, "4", record)
    policy = await PolicyRegistry(redis_client, "test").get(4)
    assert (policy.policy_version, policy.step) == (4, 2)


def test_a_required_field_must_be_there() -> None:
    with pytest.raises(TypeError, match="address"):
        read_known_fields(ServerRecord, {"server_id": "a", "engine": "torch"})
