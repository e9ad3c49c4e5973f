"""Tasks in Redis: whatever workers do, each place of a task gets one session, and each task becomes one group."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.sessions.session_store import Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.keys import RunKeys
from penstock.store.ownership import Owner
from penstock.v1 import tasks_pb2
from support.redis_server import num_commands

MANY = 1000
State = tasks_pb2.Task


def new_task(task_id: str, payload: str, num_sessions: int = 1, deadline_s: float = 0.0) -> tasks_pb2.NewTask:
    return tasks_pb2.NewTask(task_id=task_id, payload_json=payload, num_sessions=num_sessions, deadline_s=deadline_s)


class Stores:
    def __init__(self, client: Any, **limits: Any) -> None:
        self.client = client
        kept = SessionLimits(**{"task_lease_s": 3600} | limits)  # leases end when a test ends them
        self.sessions = SessionStore(client, "test", 3600, kept)
        self.tasks = TaskStore(client, "test", 3600, kept)

    async def expire_leases(self) -> None:
        """Let all leases run out now."""
        key = RunKeys("test").task_leases
        for name in await self.client.zrange(key, 0, -1):
            await self.client.zadd(key, {name: 1}, xx=True)

    async def reward(self, session_id: str, task_id: str = "") -> str:
        await self.sessions.record(session_id, b"call", f"c-{session_id}")
        return (await self.sessions.close(session_id, Reward(1.0, {}), task_id)).state


@pytest.fixture
def stores(redis_client: redis.Redis) -> Stores:
    return Stores(redis_client)


async def test_a_task_is_complete_with_its_sessions(stores: Stores) -> None:
    assert await stores.tasks.submit([new_task("t", '{"a": 1}', 2), new_task("u", "2")], "key") == (["t", "u"], False)
    assert await stores.tasks.submit([new_task("v", "1")], "key") == (["t", "u"], True)
    assert await stores.tasks.submit([new_task("u", "2")]) == (["u"], False)
    with pytest.raises(Conflict):
        await stores.tasks.submit([new_task("t", "other", 9)])
    leases = await stores.tasks.lease("w", 9, MANY)
    assert [(lease.task_id, lease.session_id) for lease in leases] == [("t", "t.0.1"), ("t", "t.1.1"), ("u", "u.0.1")]
    first = leases[0]
    assert (first.task_id, first.session_id, first.attempt, first.payload_json) == ("t", "t.0.1", 1, '{"a": 1}')
    assert await stores.reward("t.1.1") == "joined"
    assert (await stores.tasks.get("t")).state == State.OPEN
    assert await stores.reward("t.0.1") == "complete"
    task = await stores.tasks.get("t")
    assert (task.state, list(task.session_ids)) == (State.COMPLETE, ["t.0.1", "t.1.1"])
    await stores.sessions.finish("task:t", task.session_ids, [5])
    task = await stores.tasks.get("t")
    assert (task.state, list(task.prompt_ids)) == (State.FINISHED, [5])
    assert (await stores.sessions.close("t.0.1", Reward(0.0, {}))).prompt_ids == (5,)
    with pytest.raises(NotFound, match="no task 'x'"):
        await stores.tasks.get("x")


async def test_more_tasks_than_lua_can_unpack_are_accepted_and_replayed(redis_client: redis.Redis) -> None:
    stores = Stores(redis_client, max_task_places=20_000)
    tasks = [new_task(f"t{number}", "1") for number in range(9_000)]
    for is_replayed in (False, True):
        assert await stores.tasks.submit(tasks, "key") == ([task.task_id for task in tasks], is_replayed)


async def test_a_worker_that_dies_returns_its_task(stores: Stores) -> None:
    await stores.tasks.submit([new_task("t", "1")])
    [first] = await stores.tasks.lease("dies", 1, MANY)
    assert await stores.tasks.lease("w", 1, MANY) == []
    assert await stores.tasks.heartbeat([first.session_id]) == []
    await stores.expire_leases()
    [second] = await stores.tasks.lease("w", 1, MANY)
    assert (second.session_id, second.attempt) == ("t.0.2", 2)
    assert await stores.tasks.heartbeat([first.session_id, second.session_id]) == [first.session_id]
    # The first worker was only slow. Its reward counts, and the other session is abandoned.
    assert await stores.reward(first.session_id) == "complete"
    assert await stores.tasks.heartbeat([second.session_id]) == [second.session_id]
    closing = await stores.sessions.close(second.session_id, Reward(1.0, {}))
    assert (closing.state, closing.prompt_ids) == ("answered", ())


async def test_a_call_of_a_session_renews_its_lease(stores: Stores) -> None:
    await stores.tasks.submit([new_task("t", "1")])
    [lease] = await stores.tasks.lease("w", 1, MANY)
    await stores.expire_leases()
    await stores.sessions.open(lease.session_id)
    assert await stores.tasks.sweep() == (0, 0) and await stores.tasks.heartbeat([lease.session_id]) == []


async def test_a_place_that_fails_too_often_is_abandoned(redis_client: redis.Redis) -> None:
    stores = Stores(redis_client, task_max_failures=2)
    await stores.tasks.submit([new_task("t", "1", 2), new_task("u", "1")])
    for _ in range(2):
        leases = await stores.tasks.lease("w", 9, MANY)
        for lease in leases:
            if lease.session_id.startswith(("t.0", "u")):
                assert await stores.tasks.give_back(lease.session_id, "the repository is gone")
    assert await stores.reward("t.1.1") == "complete", "with what is there"
    failed = await stores.tasks.get("u")
    assert (failed.state, failed.failure) == (State.FAILED, "the repository is gone")
    assert (await stores.tasks.stat()).conservation_error == 0


async def test_a_deadline_completes_a_task_with_what_is_there(stores: Stores) -> None:
    await stores.tasks.submit([new_task("t", "1", 3, deadline_s=1000), new_task("none", "1", 1, deadline_s=1000)])
    leases = await stores.tasks.lease("w", 9, MANY)
    await stores.reward(leases[1].session_id)
    assert await stores.tasks.sweep() == (0, 0)
    await stores.client.zadd(RunKeys("test").task_due, {"t": 1, "none": 1})
    assert await stores.tasks.sweep() == (0, 2)
    assert (await stores.tasks.get("t")).state == State.COMPLETE
    assert (await stores.tasks.get("none")).state == State.FAILED
    assert await stores.sessions.due() == ["task:t"] and await stores.sessions.due() == []
    assert (await stores.reward("own", "t")) == "answered", "it comes too late"
    stat = await stores.tasks.stat()
    assert (stat.rewarded, stat.dropped, stat.conservation_error) == (1, 3, 0)


async def test_new_tasks_begin_only_as_admission_allows(redis_client: redis.Redis) -> None:
    stores = Stores(redis_client, max_task_places=5)
    await stores.tasks.submit([new_task(name, "1", 2) for name in ("a", "b")])
    with pytest.raises(QueueFull, match="max_task_places"):
        await stores.tasks.submit([new_task("c", "1", 2)])
    assert await stores.tasks.lease("w", 9, 0) == []
    assert {lease.task_id for lease in await stores.tasks.lease("w", 1, 1)} == {"a"}
    assert [lease.session_id for lease in await stores.tasks.lease("w", 9, 1)] == ["a.1.1"], "an open task goes on"


async def test_sessions_with_names_of_their_own_join_a_task(stores: Stores) -> None:
    await stores.tasks.submit([new_task("t", "1", 2)])
    with pytest.raises(NotFound, match="submit it first"):
        await stores.reward("mine-0", "unknown")
    assert await stores.reward("mine-1", "t") == "joined"
    assert await stores.reward("mine-2", "t") == "complete"
    assert await stores.reward("mine-3", "t") == "answered"
    assert (await stores.tasks.get("t")).session_ids == ["mine-1", "mine-2"]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
async def test_every_place_is_rewarded_once_whatever_workers_do(stores: Stores, seed: int) -> None:
    chance = random.Random(seed)
    wanted = {f"t{number}": chance.randint(1, 4) for number in range(8)}
    tasks = [new_task(name, "1", num_sessions) for name, num_sessions in wanted.items()]
    held: list[str] = []
    joined: dict[str, set[str]] = {name: set() for name in wanted}

    async def step() -> None:
        kind = chance.choice(["submit", "lease", "lease", "reward", "reward", "again", "die", "return", "sweep"])
        if kind == "submit":
            await stores.tasks.submit(tasks, "all")
        elif kind == "lease":
            held.extend(lease.session_id for lease in await stores.tasks.lease("w", 3, 4))
        elif kind in ("reward", "again") and held:
            session_id = chance.choice(held)
            if kind == "reward":
                held.remove(session_id)
            try:
                state = await stores.reward(session_id)
            except Conflict:  # It has its reward already, so no further call is recorded.
                state = (await stores.sessions.close(session_id, Reward(1.0, {}))).state
            if state in ("joined", "complete"):
                joined[session_id.rsplit(".", 2)[0]].add(session_id)
        elif kind == "die":
            await stores.expire_leases()
        elif kind == "return" and held:
            await stores.tasks.give_back(held.pop(), "")
        elif kind == "sweep":
            await stores.tasks.sweep()

    for _ in range(40):
        await asyncio.gather(*(step() for _ in range(chance.randint(1, 3))))
        assert (await stores.tasks.stat()).conservation_error == 0
    await stores.tasks.submit(tasks, "all")
    while leases := await stores.tasks.lease("last", 9, MANY):
        for lease in leases:
            await stores.reward(lease.session_id)
    for name, num_sessions in wanted.items():
        task = await stores.tasks.get(name)
        assert task.num_rewarded == len(task.session_ids) <= num_sessions
        assert len({session_id.rsplit(".", 1)[0] for session_id in task.session_ids}) == len(task.session_ids)
        assert joined[name] <= set(task.session_ids)


async def test_a_rewarded_session_does_not_join_a_task_afterwards(stores: Stores) -> None:
    """Its first reward made it a group of its own, which may not be in the queue yet."""
    await stores.tasks.submit([new_task("t", "1")])
    assert await stores.reward("s") == "closed"
    closing = await stores.sessions.close("s", Reward(0.0, {}), "t")
    assert (closing.state, closing.reward) == ("closed", Reward(1.0, {}))
    assert (await stores.tasks.get("t")).num_rewarded == 0
    # A task of this name is submitted later, so that the session looks like one of its places.
    assert await stores.reward("u.0.1") == "closed"
    await stores.tasks.submit([new_task("u", "1")])
    assert (await stores.sessions.close("u.0.1", Reward(0.0, {}))).state == "closed"
    assert (await stores.tasks.get("u")).num_rewarded == 0


async def test_a_session_of_its_own_takes_no_place_that_has_failed(redis_client: redis.Redis) -> None:
    stores = Stores(redis_client, task_max_failures=1)
    await stores.tasks.submit([new_task("t", "1", 3)])
    leases = await stores.tasks.lease("w", 3, MANY)
    assert await stores.tasks.give_back(leases[0].session_id, "no disk")
    assert await stores.reward("mine", "t") == "joined", "a place that is leased is left"
    assert await stores.reward(leases[2].session_id) == "complete"
    assert (await stores.tasks.get("t")).session_ids == ["mine", leases[2].session_id]
    assert (await stores.tasks.stat()).conservation_error == 0


@pytest.mark.parametrize("num_owners", [511, 2_000, 10_000])
async def test_tasks_of_any_number_of_owners_are_worked_on(redis_client: redis.Redis, num_owners: int) -> None:
    """Beyond 512 owners the order of a task is larger than the integers that a double counts exactly."""
    stores, new, other = Stores(redis_client, task_max_failures=2), Owner("new", False), Owner("other", False)
    await redis_client.hset(RunKeys("test").counters, "task_owners", num_owners)
    await stores.tasks.submit([new_task("t", "1", 2), new_task("u", "1")], owner=new)
    await stores.tasks.submit([new_task("v", "1")], owner=other)
    for expire in (stores.tasks.sweep, lambda: stores.tasks.lease("w", 0, MANY, other)):
        leases = await stores.tasks.lease("w", 9, MANY, new)
        assert sorted(lease.task_id for lease in leases) == ["t", "t", "u"]
        assert await stores.tasks.give_back(leases[0].session_id, owner=new)
        await stores.expire_leases()
        await expire()
        assert (await stores.tasks.stat()).leased == 0
    [lease] = await stores.tasks.lease("w", 9, MANY, other)
    assert lease.task_id == "v" and await stores.reward(lease.session_id) == "complete"
    for lease in await stores.tasks.lease("w", 9, MANY, new):
        await stores.reward(lease.session_id)
    stat = await stores.tasks.stat()
    assert (stat.pending + stat.leased, stat.conservation_error) == (0, 0)


async def test_the_work_for_a_place_does_not_grow_with_its_task(redis_client: redis.Redis) -> None:
    """A lease that expires, a reward and a failure cost no more commands in a task of 512 places than in one of 16."""

    async def costs(num_sessions: int) -> list[int]:
        await redis_client.flushdb()
        stores = Stores(redis_client)
        await stores.tasks.submit([new_task("t", "1", num_sessions)])
        leases = await stores.tasks.lease("w", num_sessions, MANY)
        await stores.sessions.record(leases[0].session_id, b"call", "c")
        found = []
        for call in (
            lambda: stores.sessions.close(leases[0].session_id, Reward(1.0, {})),
            lambda: stores.tasks.give_back(leases[1].session_id, "broken"),
            stores.tasks.sweep,
        ):
            before = await num_commands(redis_client)
            await call()
            found.append(await num_commands(redis_client) - before)
            await stores.expire_leases()
        return found

    small, large = await costs(16), await costs(512)
    small[2] *= 7  # one sweep returns 14 places of the small task, and 100 of the large one
    assert all(many < 2 * few for few, many in zip(small, large, strict=True)), (small, large)


async def test_a_sweep_that_ends_many_tasks_does_not_stall_the_queue(redis_client: redis.Redis) -> None:
    stores = Stores(redis_client)
    names = [f"t{number}" for number in range(40)]
    await stores.tasks.submit([new_task(name, "1", 250, deadline_s=1000) for name in names])
    while len(await redis_client.zrange(RunKeys("test").task_due, 0, -1)) < len(names):
        await stores.tasks.lease("w", 512, MANY)
    await redis_client.zadd(RunKeys("test").task_due, dict.fromkeys(names, 1))
    counts, costs = [], []
    while (await stores.tasks.stat()).open_tasks:
        before = await num_commands(redis_client)
        counts.append((await stores.tasks.sweep())[1])
        costs.append(await num_commands(redis_client) - before)
    assert sum(counts) == len(names) and max(counts) == 5, "about 1,024 places in each sweep"
    assert max(costs) < 3 * min(costs), costs
    assert (await stores.tasks.stat()).conservation_error == 0
