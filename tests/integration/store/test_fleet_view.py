"""The view of a fleet on a real Redis: it reads the fleet only when it has to, and shows every change at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import redis.asyncio as redis

from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, FleetReading, FleetView, ServerRecord

FOREVER_S = 3600.0
SERVER = ServerRecord("a", "127.0.0.1:1", "torch")


class CountingFleet(Fleet):
    """Counts how often the whole fleet is read."""

    num_reads = 0

    async def servers(self) -> list[ServerRecord]:
        self.num_reads += 1
        return await super().servers()


def states(reading: FleetReading) -> dict[str, str]:
    return {server.server_id: server.state for server in reading.servers}


async def test_a_view_shows_every_join_state_and_departure_at_once(
    redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    fleet, term = CountingFleet(redis_client, "test"), await queue.take_term(0)
    view = FleetView(fleet, FOREVER_S)
    assert states(await view.current()) == {}
    await fleet.report(SERVER)
    assert states(await view.current()) == {"a": "JOINING"}
    await fleet.join(replace(SERVER, server_id="b"))
    assert states(await view.current()) == {"a": "JOINING", "b": "JOINING"}
    await fleet.set_states(["a", "b"], "READY", term)
    assert states(await view.current()) == {"a": "READY", "b": "READY"}
    await fleet.leave("a")
    assert states(await view.current()) == {"b": "READY"}
    await asyncio.sleep(0.01)
    assert await fleet.forget_silent(0.001, term)
    assert states(await view.current()) == {}


async def test_a_view_reads_the_fleet_once_while_servers_only_report(redis_client: redis.Redis) -> None:
    fleet = CountingFleet(redis_client, "test")
    view = FleetView(fleet, FOREVER_S)
    await fleet.join(SERVER)
    first = await view.current()
    for load in range(5):
        await fleet.report(replace(SERVER, running_groups=load))
        assert await view.current() is first
    assert fleet.num_reads == 1
    assert [server.running_groups for server in (await view.read()).servers] == [4]
    assert fleet.num_reads == 2
    await fleet.report(replace(SERVER, policy_version=8))
    assert [server.policy_version for server in (await view.current()).servers] == [8]


async def test_a_view_is_not_older_than_its_bound(redis_client: redis.Redis) -> None:
    fleet = CountingFleet(redis_client, "test")
    view = FleetView(fleet, 0.0)
    await fleet.join(SERVER)
    await view.current()
    await fleet.report(replace(SERVER, running_groups=7))
    assert [server.running_groups for server in (await view.current()).servers] == [7]


async def test_a_large_fleet_is_read_for_its_age_only_after_as_many_looks_as_it_has_servers(
    redis_client: redis.Redis,
) -> None:
    fleet, num_servers = CountingFleet(redis_client, "test"), 5
    for number in range(num_servers):
        await fleet.join(replace(SERVER, server_id=str(number)))
    view = FleetView(fleet, 0.0, rarely_used_age_s=FOREVER_S)
    first = await view.current()
    for _ in range(num_servers):
        assert await view.current() is first
    assert await view.current() is not first
    assert fleet.num_reads == 2
    await fleet.set_states(["0"], "READY")  # a change counts at once nevertheless
    assert states(await view.current())["0"] == "READY"
    assert fleet.num_reads == 3


async def test_a_reading_that_is_rarely_used_has_a_bound_too(redis_client: redis.Redis) -> None:
    fleet = CountingFleet(redis_client, "test")
    view = FleetView(fleet, 0.0, rarely_used_age_s=0.0)
    await fleet.join(SERVER)
    await fleet.join(replace(SERVER, server_id="b"))
    assert await view.current() is not await view.current()


async def test_callers_that_look_at_the_same_time_share_a_reading(redis_client: redis.Redis) -> None:
    fleet = CountingFleet(redis_client, "test")
    view = FleetView(fleet, FOREVER_S)
    await fleet.join(SERVER)
    readings = await asyncio.gather(*(view.current() for _ in range(20)))
    assert fleet.num_reads < 20
    assert all(states(reading) == {"a": "JOINING"} for reading in readings)


async def test_a_reading_says_when_a_serving_server_may_be_silent(redis_client: redis.Redis) -> None:
    fleet = Fleet(redis_client, "test")
    reading = await FleetView(fleet, FOREVER_S).read()
    quiet = replace(SERVER, heartbeat_age_ms=9_000, state="READY")
    gone = replace(SERVER, heartbeat_age_ms=99_000, state="EVICTED")
    assert 0 < replace(reading, servers=[quiet, gone]).first_silence_s(60.0) <= 51
    assert replace(reading, servers=[quiet, gone]).first_silence_s(9.0) <= 0
