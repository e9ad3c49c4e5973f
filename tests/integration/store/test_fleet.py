"""The fleet registry on a real Redis."""

from __future__ import annotations

import json

import pytest
import redis.asyncio as redis

from penstock.errors import Fenced
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, Reported, RunControl, ServerRecord
from penstock.store.notices import Notices
from penstock_learner.loop.process import FORGOTTEN_AFTER_S, forget_silent_servers


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
    assert await fleet.report(ServerRecord("a", "127.0.0.1:1", "torch")) == Reported("EVICTED", None)
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


async def test_a_report_answers_with_the_version_that_the_run_or_the_server_is_held_at(
    redis_client: redis.Redis,
) -> None:
    fleet, control = Fleet(redis_client, "test"), RunControl(redis_client, "test")
    server = ServerRecord("a", "127.0.0.1:1", "torch")
    await fleet.join(server)
    assert await fleet.report(server) == Reported("JOINING", None)
    await PolicyRegistry(redis_client, "test").pin("a", 0)
    assert await fleet.report(server) == Reported("JOINING", 0)
    await control.hold(4)
    assert await fleet.report(server) == Reported("JOINING", 4)
    await control.release()
    assert await fleet.report(server) == Reported("JOINING", 0)


async def test_a_report_answers_with_the_version_that_was_published_last(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet, server = Fleet(redis_client, "test"), ServerRecord("a", "127.0.0.1:1", "torch")
    assert (await fleet.report(server)).current_version == 0
    await queue.take_term(0)
    await queue.publish(7, 1, b"")
    assert (await fleet.report(server)).current_version == 7


async def test_many_servers_move_in_one_call_and_those_that_left_do_not(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet, term = Fleet(redis_client, "test"), await queue.take_term(0)
    for name in ("a", "b", "c"):
        await fleet.join(ServerRecord(name, "127.0.0.1:1", "torch"))
    await fleet.leave("b")
    await fleet.set_states(["a", "b", "c"], "READY", term)
    await fleet.set_states([], "EVICTED", term)
    assert [(server.server_id, server.state) for server in await fleet.servers()] == [("a", "READY"), ("c", "READY")]
    assert all(server.heartbeat_age_ms < 60_000 for server in await fleet.servers())
    with pytest.raises(Fenced):
        await fleet.set_states(["a", "c"], "EVICTED", term - 1)


async def test_a_server_that_died_leaves_the_list_with_a_notice_and_can_come_back(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet, notices, term = Fleet(redis_client, "test"), Notices(redis_client, "test"), await queue.take_term(0)
    dead, silent, alive = (ServerRecord(name, "127.0.0.1:1", "torch") for name in ("dead", "silent", "alive"))
    for record, silence_s in ((dead, FORGOTTEN_AFTER_S + 5), (silent, FORGOTTEN_AFTER_S - 60), (alive, 0)):
        await fleet.join(record)
        stored = json.loads(await redis_client.hget(fleet.keys.servers, record.server_id))
        stored["heartbeat_ms"] -= int(1000 * silence_s)
        await redis_client.hset(fleet.keys.servers, record.server_id, json.dumps(stored))
    await redis_client.hset(fleet.keys.breakers, "dead", "{}")
    for _ in range(2):
        await forget_silent_servers(fleet, notices, term)
    assert [server.server_id for server in await fleet.servers()] == ["alive", "silent"]
    assert await redis_client.hgetall(fleet.keys.breakers) == {}
    [notice] = await notices.newest_first()
    assert (notice.kind, notice.count) == ("server_lost", 1)
    assert notice.text.startswith("dead sent no heartbeat for 15 min and has left the list of servers")
    assert (await fleet.report(dead)).state is None, "it sees that it was forgotten, and joins again"
    await fleet.join(dead)
    await forget_silent_servers(fleet, notices, term)
    assert await notices.newest_first() == []
    await queue.take_term(0)
    with pytest.raises(Fenced):
        await forget_silent_servers(fleet, notices, term)
