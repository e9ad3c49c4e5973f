"""The fleet registry on a real Redis."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from penstock.errors import Fenced
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord


async def test_a_learner_whose_term_has_passed_moves_no_server(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet = Fleet(redis_client, "test")
    assert await fleet.term() == 0
    await fleet.join(ServerRecord("a", "127.0.0.1:1", "torch", policy_version=3))
    old = await queue.take_term(0)
    await fleet.set_state("a", "READY", old)
    new = await queue.take_term(0)
    with pytest.raises(Fenced, match=f"term {old} has passed; the current one is {new}"):
        await fleet.set_state("a", "EVICTED", old)
    assert [server.state for server in await fleet.servers()] == ["READY"]
    await fleet.set_state("a", "EVICTED", new)
    assert await fleet.report(ServerRecord("a", "127.0.0.1:1", "torch")) == "EVICTED"
    assert await fleet.term() == new


async def test_a_learner_does_not_bring_back_a_server_that_has_left(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet, term = Fleet(redis_client, "test"), await queue.take_term(0)
    await fleet.join(ServerRecord("a", "127.0.0.1:1", "torch"))
    await fleet.leave("a")
    await fleet.set_state("a", "READY", term)
    assert await fleet.servers() == []
    assert await redis_client.hgetall("penstock:{test}:server_states") == {}
