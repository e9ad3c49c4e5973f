"""Heartbeats and starts on a real Redis."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from penstock.store.heartbeats import Heartbeats


async def test_who_ends_in_order_is_forgotten_and_who_crashes_is_not(redis_client: redis.Redis) -> None:
    heartbeats = Heartbeats(redis_client, "test")
    async with heartbeats.beating("learner") as silence_s:
        assert silence_s is None
        assert (await heartbeats.ages_s())["learner"] < 10
    assert await heartbeats.ages_s() == {}

    with pytest.raises(RuntimeError):
        async with heartbeats.beating("learner"):
            raise RuntimeError("it crashes")
    await redis_client.hincrby(heartbeats.keys.heartbeats, "learner", -60_000)  # its last beat was a minute ago
    assert (await heartbeats.ages_s())["learner"] >= 60
    async with heartbeats.beating("learner") as silence_s:
        assert silence_s is not None and silence_s >= 60
    assert await heartbeats.restarts() == {"learner": 2}


async def test_runs_do_not_see_each_other(redis_client: redis.Redis) -> None:
    await Heartbeats(redis_client, "one").count_start("rollout-0")
    await Heartbeats(redis_client, "one").beat("learner")
    other = Heartbeats(redis_client, "two")
    assert (await other.ages_s(), await other.restarts()) == ({}, {})
