"""A rolling upgrade: records of newer and older peers are read, and a change keeps fields that it does not know."""

from __future__ import annotations

import json

import pytest
import redis.asyncio as redis

from penstock.store.fleet import Fleet, PolicyRegistry, ServerRecord
from penstock.store.keys import RunKeys
from penstock.store.redis_client import read_known_fields
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


async def test_a_policy_with_an_unknown_field_is_read(redis_client: redis.Redis) -> None:
    unknown_field = bytes([0xFA, 0x7F, 1]) + b"x"  # number 2047, one byte of text
    record = policies_pb2.Policy(policy_version=4, step=2).SerializeToString() + unknown_field
    await redis_client.hset(KEYS.policies, "4", record)
    policy = await PolicyRegistry(redis_client, "test").get(4)
    assert (policy.policy_version, policy.step) == (4, 2)


def test_a_required_field_must_be_there() -> None:
    with pytest.raises(TypeError, match="address"):
        read_known_fields(ServerRecord, {"server_id": "a", "engine": "torch"})
