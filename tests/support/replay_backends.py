"""The backends of the replay queue, for its conformance suite.

A backend makes queue objects over one shared store; add it to `BACKENDS`. A module of the suite imports both fixtures,
`make_queue` and `queue`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.codec import encode_group
from penstock.config.service import ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.trajectory import Group
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

BACKENDS = ("redis", "memory")
ReplayQueue = RedisReplayQueue | MemoryReplayQueue
MakeQueue = Callable[..., ReplayQueue]


@pytest.fixture(name="make_queue", params=BACKENDS)
def queue_maker(request: pytest.FixtureRequest) -> MakeQueue:
    """Makes queue objects that share a store. By default: 2 groups per step, staleness 1, three attempts."""
    store = MemoryStore() if request.param == "memory" else None
    client: redis.Redis | None = request.getfixturevalue("redis_client") if request.param == "redis" else None

    def make(**overrides: Any) -> ReplayQueue:
        fields = {"groups_per_step": 2, "max_staleness": 1, "max_attempts": 3, "lease_ttl_s": 600} | overrides
        if store is not None:
            return MemoryReplayQueue(store, ReplayConfig(**fields))
        assert client is not None
        return RedisReplayQueue(client, "test", ReplayConfig(**fields))

    return make


@pytest.fixture(name="queue")
def queue_of_backend(make_queue: MakeQueue) -> ReplayQueue:
    return make_queue()


async def submit(queue: ReplayQueue, count: int, key: str = "") -> list[int]:
    payloads = [f"prompt {i}".encode() for i in range(count)]
    return list((await queue.submit(payloads, [0] * count, key)).prompt_ids)


async def finish(queue: ReplayQueue, leases: list[Lease], version: int = 0) -> None:
    for lease in leases:
        assert await queue.append(lease, b"group of %d" % lease.prompt_id, version) == "accepted"


async def assert_conserved(queue: ReplayQueue) -> None:
    stat = await queue.stat()
    assert stat.conservation_error == 0, stat


async def lease_again(queue: ReplayQueue, server_id: str) -> Lease:
    """Lease the one prompt as soon as its first lease has expired."""
    async with asyncio.timeout(100):
        while True:
            leases = await queue.lease(server_id, 1)
            if leases:
                return leases[0]
            await asyncio.sleep(0.01)


async def queue_with(replay: ReplayConfig, groups: Sequence[Group | bytes]) -> MemoryReplayQueue:
    """A queue in memory with these groups appended in order, for prompts 1, 2 and so on. Bytes are appended as they
    are."""
    queue = MemoryReplayQueue(MemoryStore(), replay)
    await queue.submit([b""] * len(groups), [0] * len(groups), "")
    for lease, group in zip(await queue.lease("s", len(groups)), groups, strict=True):
        payload = group if isinstance(group, bytes) else encode_group(group)
        await queue.append(lease, payload, 0)
    await queue.take_term(0)
    return queue
