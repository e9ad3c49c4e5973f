"""Heartbeats and starts on a real Redis."""

from __future__ import annotations

import threading
import time

import pytest
import redis as redis_sync
import redis.asyncio as redis

from penstock.config.service import RedisConfig
from penstock.store.heartbeats import Heartbeats
from penstock.store.redis_client import connect
from support.redis_server import RedisProcess


async def test_who_ends_in_order_is_forgotten_and_who_crashes_is_not(redis_client: redis.Redis) -> None:
    heartbeats = Heartbeats(redis_client, "test")
    async with heartbeats.beating("learner") as silence_s:
        assert silence_s is None
        assert (await heartbeats.ages_s())["learner"] < 60
    assert await heartbeats.ages_s() == {}

    with pytest.raises(RuntimeError):
        async with heartbeats.beating("learner"):
            raise RuntimeError("it crashes")
    await redis_client.hincrby(heartbeats.keys.heartbeats, "learner", -60_000)  # its last beat was a minute ago
    assert (await heartbeats.ages_s())["learner"] >= 60
    async with heartbeats.beating("learner") as silence_s:
        assert silence_s is not None and silence_s >= 60
    assert await heartbeats.restarts() == {"learner": 2}


def block_until_beat(url: str, key: str, first: bytes) -> None:
    deadline = time.monotonic() + 100
    with redis_sync.Redis.from_url(url) as client:
        while client.hget(key, "learner") == first:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.05)


async def test_a_busy_event_loop_does_not_silence_a_part(redis_process: RedisProcess) -> None:
    config = RedisConfig(url=redis_process.url)
    client = connect(config)
    try:
        heartbeats = Heartbeats(client, "test")
        await heartbeats.beat("learner")
        first = await client.hget(heartbeats.keys.heartbeats, "learner")
        with heartbeats.beating_in_thread("learner", lambda: connect(config)):
            block_until_beat(redis_process.url, heartbeats.keys.heartbeats, first)
        assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat of learner"]
    finally:
        await client.aclose()


async def test_runs_do_not_see_each_other(redis_client: redis.Redis) -> None:
    await Heartbeats(redis_client, "one").count_start("rollout-0")
    await Heartbeats(redis_client, "one").beat("learner")
    other = Heartbeats(redis_client, "two")
    assert (await other.ages_s(), await other.restarts()) == ({}, {})
