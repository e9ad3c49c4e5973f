"""The contract of a session store: the one in Redis and the one in memory."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio as redis

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.sessions.session_store import Reward, SessionStore
from penstock.store.keys import RunKeys
from support.memory_sessions import MemorySessionStore

LIMITS = SessionLimits(max_calls=3, max_bytes=2048, max_total_bytes=4096)


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Any:
    return SessionStore(redis_client, "test", 3600, LIMITS) if request.param == "redis" else MemorySessionStore(LIMITS)


async def test_calls_are_read_from_where_the_reader_stands(store: Any) -> None:
    assert await store.open("s") == ("", [])
    await store.record("s", b"one", "c1")
    await store.record("s", b"two", "c2", "c1")
    assert await store.open("s") == ("c1", [b"one", b"two"])
    assert await store.open("s", "c1", 1) == ("c1", [b"two"])
    assert await store.open("s", "another list", 1) == ("c1", [b"one", b"two"])
    assert await store.calls("s") == [b"one", b"two"]


async def test_the_first_reward_closes_a_session(store: Any) -> None:
    with pytest.raises(NotFound, match="has no calls"):
        await store.close("s", Reward(1.0, {}))
    await store.record("s", b"one", "c1")
    for value in (0.5, 0.75):
        closing = await store.close("s", Reward(value, {"a": 1.0}))
        assert (closing.state, closing.reward) == ("closed", Reward(0.5, {"a": 1.0}))
    with pytest.raises(Conflict, match="already has its reward"):
        await store.open("s")
    with pytest.raises(Conflict, match="got its reward while"):
        await store.record("s", b"two", "c2")
    await store.finish("session:s", ["s"], [7])
    closing = await store.close("s", Reward(0.75, {}))
    assert (closing.state, closing.prompt_ids) == ("answered", (7,))
    assert await store.calls("s") == []


async def test_the_first_answer_to_a_reward_stays(store: Any) -> None:
    """Two gateways finish the same session, and the slower one finds no calls any more."""
    await store.record("s", b"one", "c1")
    await store.close("s", Reward(1.0, {}))
    assert await store.answer("s") is None
    assert await store.finish("session:s", ["s"], [7]) == (7,)
    assert await store.finish("session:s", ["s"], []) == (7,)
    assert await store.answer("s") == (7,)
    assert (await store.close("s", Reward(1.0, {}))).prompt_ids == (7,)


async def test_sessions_are_bounded(store: Any) -> None:
    for number in range(3):
        await store.record("long", b"x", f"c{number}")
    with pytest.raises(Conflict, match="give it its reward"):
        await store.record("long", b"x", "c3")
    await store.record("large", bytes(2000), "c")
    with pytest.raises(Conflict, match="give it its reward"):
        await store.record("large", bytes(100), "c2")
    await store.record("other", bytes(1500), "c")
    with pytest.raises(QueueFull, match="max_total_bytes"):
        await store.record("one more", bytes(1000), "c")
    await store.close("large", Reward(1.0, {}))
    await store.finish("session:large", ["large"], [1])
    await store.record("one more", bytes(1000), "c")


async def test_a_call_that_refers_to_expired_calls_is_refused(redis_client: redis.Redis) -> None:
    store, keys = SessionStore(redis_client, "test", 3600, LIMITS), RunKeys("test")
    await store.record("s", b"one", "c1")
    await redis_client.delete(keys.session("s", "calls"), keys.session("s", "state"))
    with pytest.raises(Conflict, match="has expired"):
        await store.record("s", b"two", "c2", "c1")
    await store.record("s", b"three", "c3")
    assert await store.open("s", "c1", 1) == ("c3", [b"three"])


async def test_a_rewarded_session_is_kept_until_it_is_a_group(redis_client: redis.Redis) -> None:
    store, keys = SessionStore(redis_client, "test", 3600, LIMITS), RunKeys("test")
    await store.record("s", b"one", "c1")
    await store.close("s", Reward(1.0, {}))
    assert [await redis_client.ttl(keys.session("s", name)) for name in ("calls", "state")] == [-1, -1]
    assert await redis_client.zscore(keys.sessions, "s") == float("inf"), "no other call forgets it"
    await store.record("other", b"one", "c2")
    assert await store.calls("s") == [b"one"]
    await store.finish("session:s", ["s"], [7])
    assert 0 < await redis_client.ttl(keys.session("s", "state")) <= 3600
    assert await redis_client.zrange(keys.sessions, 0, -1) == [b"other"]


async def test_a_session_may_have_more_calls_than_lua_returns_as_values(redis_client: redis.Redis) -> None:
    store = SessionStore(redis_client, "test", 3600, SessionLimits(max_calls=20_000))
    await store.record("s", b"0", "c")
    await redis_client.rpush(RunKeys("test").session("s", "calls"), *(b"%d" % number for number in range(1, 12_000)))
    assert (await store.open("s"))[1][-1] == b"11999"


async def test_the_bytes_of_expired_sessions_are_given_back(redis_client: redis.Redis) -> None:
    store, keys = SessionStore(redis_client, "test", 3600, LIMITS), RunKeys("test")
    for name in ("a", "b"):
        await store.record(name, bytes(1500), "c")
        await redis_client.delete(keys.session(name, "calls"))
        await redis_client.zadd(keys.sessions, {name: 1})  # Its time has passed.
    await store.record("c", bytes(1500), "c")
    assert await redis_client.hgetall(keys.session_sizes) == {b"c": b"1500"}
    assert await redis_client.hget(keys.counters, "session_bytes") == b"1500"
    for name in ("calls", "state"):
        assert 0 < await redis_client.ttl(keys.session("c", name)) <= 3600
