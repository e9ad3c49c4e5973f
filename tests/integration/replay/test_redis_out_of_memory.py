"""A real Redis that is out of memory: producers wait, calls that free memory still work, and then producers go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from penstock.cancellation import end_task
from penstock.codec import encode_prompt
from penstock.config.rollout import RolloutConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import QueueFull
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.redis_client import connect
from penstock.trajectory import Group, Prompt
from penstock_rollout.groups import producer as producer_module
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_tools.local.private_redis import write_config
from support.groups import make_group
from support.redis_server import RedisProcess

CONFIG = ReplayConfig(groups_per_step=4, max_staleness=99, append_timeout_s=250, lease_ttl_s=600)


@pytest.fixture
def small_redis(tmp_path: Path) -> RedisProcess:
    server = RedisProcess(tmp_path)
    server.config, server.url = write_config(tmp_path, server.port, max_memory_bytes=4 * 2**20)
    return server


@pytest.fixture
async def client(small_redis: RedisProcess) -> AsyncIterator[Redis]:
    small_redis.start()
    client = connect(RedisConfig(url=small_redis.url))
    yield client
    await client.aclose()
    small_redis.kill()


@pytest.fixture
async def queue(client: Redis) -> RedisReplayQueue:
    return RedisReplayQueue(client, "full", CONFIG)


async def test_what_frees_memory_runs_when_redis_is_full(client: Redis, queue: RedisReplayQueue) -> None:
    await queue.submit([b"p"] * 12, [0] * 12, "")
    leases = await queue.lease("s", 10)
    for lease in leases[:8]:
        await queue.append(lease, b"x" * 10_000, 0)
    await queue.take_term(0)
    await queue.take(1, 4)
    fleet = Fleet(client, "full")
    await fleet.join(ServerRecord("s", "127.0.0.1:1", "torch"))
    await client.config_set("maxmemory", 2**20 // 2)

    for refused in (
        queue.append(leases[8], b"x" * 10_000, 0), queue.submit([b"p"], [0], ""), queue.create_evaluation("e", [b"q"]),
    ):  # fmt: skip
        with pytest.raises(QueueFull):
            await refused
    assert (await queue.stat()).conservation_error == 0

    assert await queue.heartbeat("s", leases[8:]) == []
    assert len(await queue.lease("s", 1)) == 1
    await queue.give_back("s", leases[9], failure="oops")
    await fleet.set_state("s", "READY")
    assert [server.state for server in await fleet.servers()] == ["READY"]
    await queue.take_term(0)
    assert await queue.rewind_step(0, 0) == {1: [1, 2, 3, 4]}
    assert await queue.take(2, 3) == [5, 6, 7]
    await queue.publish(await queue.allocate_version(1), 1, b"policy")
    await queue.expire(5)
    await queue.discard(6, "no_spread")
    await queue.dead_letter(7, "corrupt")
    assert await queue.commit(1, [1, 2, 3, 4]) == 4
    stat = await queue.stat()
    assert (stat.trained, stat.expired, stat.dead_lettered, stat.conservation_error) == (4, 2, 1, 0)
    group_keys = [key async for key in client.scan_iter(match=f"{queue.keys.prefix}group:*")]
    assert group_keys == [f"{queue.keys.prefix}group:8:1".encode()], "a refused append leaves no bytes behind"

    await client.config_set("maxmemory", 4 * 2**20)
    assert await queue.append(leases[8], b"x" * 10_000, 0) == "accepted"


class BigGroups:
    """Makes groups of about 200 KB."""

    async def make(self, lease: Lease, prompt: Prompt, *_: object) -> Group:
        group = make_group(lease.prompt_id, attempt=lease.attempt)
        random = np.random.default_rng(lease.prompt_id)
        return replace(group, prompt_token_ids=random.integers(0, 2**31 - 1, 60_000).astype(np.int32))


def make_producer(queue: RedisReplayQueue, replay: ReplayConfig) -> Producer:
    metrics = RolloutMetrics(CollectorRegistry())
    rollout = RolloutConfig(max_concurrent_groups=4)
    maker = BigGroups()
    return Producer(queue, "s", maker, rollout, replay, metrics, lambda: True)  # type: ignore[arg-type]


async def fill(queue: RedisReplayQueue, count: int) -> None:
    payload = encode_prompt(Prompt(messages=(("user", "?"),)))
    await queue.submit([payload] * count, [0] * count, "")


async def test_producers_wait_and_go_on(queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 groups of 200 KB pass through a Redis of 4 MB, although the queue's byte limit is higher. Each is trained
    once."""
    monkeypatch.setattr(producer_module, "RETRY_S", 0.02)
    await fill(queue, 40)
    producer = make_producer(queue, CONFIG)
    await queue.take_term(0)
    trained: list[int] = []
    async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(producer.lease_loop()), tasks.create_task(producer.heartbeat_loop())]
        await until(lambda: waited(producer) > 0)
        step = 0
        while len(trained) < 40:
            step += 1
            taken = await queue.take(step, 4)
            trained += taken
            await queue.commit(step, taken)
            await asyncio.sleep(0.01)
        for loop in loops:
            await end_task(loop)
    assert sorted(trained) == list(range(1, 41))
    stat = await queue.stat()
    assert (stat.trained, stat.dead_lettered, stat.reclaimed, stat.conservation_error) == (40, 0, 0, 0)


async def test_a_producer_that_waits_too_long_gives_the_prompt_back(
    client: Redis, queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "RETRY_S", 0.02)
    await fill(queue, 1)
    await client.config_set("maxmemory", 2**20 // 2)
    producer = make_producer(queue, CONFIG.model_copy(update={"append_timeout_s": 0.2}))
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(producer.lease_loop())
        await until(lambda: producer.metrics.failures.labels("deadline_exceeded")._value.get() > 0)
        await end_task(loop)
    assert waited(producer) > 0.05
    assert (await queue.stat()).conservation_error == 0


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  a metric has no event
        await asyncio.sleep(0.01)


def waited(producer: Producer) -> float:
    value: float = producer.metrics.append_wait._value.get()
    return value
