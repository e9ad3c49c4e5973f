"""Random operations on the replay queue: after each one, nothing is lost and the limiter agrees with its formula."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conftest import RedisProcess
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import Fenced
from penstock.replay.contract import Lease
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock.replay.memory_store import MemoryStore
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.redis_client import connect

LEASE_TTL_S = 10.0
CONFIGS = [
    ReplayConfig(
        groups_per_step=2, max_staleness=1, max_attempts=2, stale_policy=policy, selection=selection,
        lease_ttl_s=LEASE_TTL_S, capacity_bytes=2**20,
    )
    for policy, selection in (("wait", "fifo"), ("drop", "fifo"), ("correct", "freshest"))
]  # fmt: skip
indices = st.integers(0, 7)


class ReplayMachine(RuleBasedStateMachine):
    """Two rollout servers, a learner and its zombie predecessor, driven in any order."""

    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0
        self.held: list[tuple[str, Lease]] = []
        """Every lease ever granted: a server may act on one long after it was lost."""
        self.taken: list[int] = []
        self.committed: list[int] = []
        self.step = 0

    def queues(self, config: ReplayConfig) -> tuple[Any, Any]:
        store = MemoryStore(lambda: self.time_s)
        return MemoryReplayQueue(store, config), MemoryReplayQueue(store, config)

    def do(self, call: Any) -> Any:
        return self.runner.run(call)

    @initialize(config=st.sampled_from(CONFIGS), finished=st.permutations(range(4)))
    def start(self, config: ReplayConfig, finished: list[int]) -> None:
        """Begin in the middle: six prompts, four of them leased, three of those finished in any order."""
        self.queue, self.zombie = self.queues(config)
        self.do(self.zombie.take_term(0))
        self.do(self.queue.take_term(0))
        self.submit([0, 0, 0, 1, 0, 0])
        self.lease("a", 4)
        for index in finished[:3]:
            self.append(index, 1, 0)

    @rule(priorities=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def submit(self, priorities: list[int]) -> None:
        self.do(self.queue.submit([b"p"] * len(priorities), priorities, ""))

    @rule(server=st.sampled_from(["a", "b"]), count=st.integers(1, 4))
    def lease(self, server: str, count: int) -> None:
        before = self.do(self.queue.stat())
        leases = self.do(self.queue.lease(server, count))
        after = self.do(self.queue.stat())
        gained = after.admitted - before.admitted
        freed = after.dead_lettered - before.dead_lettered
        assert gained <= before.admission_room + freed
        if len(leases) < count and after.queued_bytes < self.queue.config.capacity_bytes:
            assert after.pending_prompts == 0 or after.admission_room == 0
        self.held += [(server, lease) for lease in leases]

    @precondition(lambda self: self.held)
    @rule(index=indices, size=st.sampled_from([1, 400_000]), version=st.integers(0, 3))
    def append(self, index: int, size: int, version: int) -> None:
        _, lease = self.held[index % len(self.held)]
        self.do(self.queue.append(lease, b"g" * size, version))

    @precondition(lambda self: self.held)
    @rule(index=indices, failure=st.sampled_from(["", "oops"]))
    def give_back(self, index: int, failure: str) -> None:
        server, lease = self.held[index % len(self.held)]
        self.do(self.queue.give_back(server, lease, failure))

    @precondition(lambda self: self.held)
    @rule(index=indices)
    def heartbeat(self, index: int) -> None:
        server, lease = self.held[index % len(self.held)]
        self.do(self.queue.heartbeat(server, [lease]))

    @rule(seconds=st.sampled_from([1.0, LEASE_TTL_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        taken = self.do(self.queue.take(self.step + 1, count))
        assert not set(taken) & set(self.committed)
        self.taken += taken

    @rule(count=st.integers(1, 2))
    def lose_the_reply_of_a_take(self, count: int) -> None:
        self.do(self.queue.take(self.step + 1, count))

    @precondition(lambda self: self.taken)
    @rule(index=indices, how=st.sampled_from(["expire", "discard", "dead_letter"]))
    def drop(self, index: int, how: str) -> None:
        prompt_id = self.taken.pop(index % len(self.taken))
        if how == "expire":
            self.do(self.queue.expire(prompt_id))
        else:
            self.do(getattr(self.queue, how)(prompt_id, "reason"))

    @rule()
    def train(self) -> None:
        self.step += 1
        self.do(self.queue.publish(self.step, self.step, b""))
        assert self.do(self.queue.commit(self.step, self.taken)) == len(self.taken)
        self.committed += self.taken
        self.taken = []

    @rule()
    def restart_the_learner(self) -> None:
        self.do(self.queue.take_term(0))
        manifests = self.do(self.queue.restore(self.step))
        assert {i for ids in manifests.values() for i in ids} >= set(self.taken)

    @rule()
    def the_zombie_is_fenced(self) -> None:
        with pytest.raises(Fenced):
            self.do(self.zombie.commit(99, list(range(1, 20))))

    @invariant()
    def conserved(self) -> None:
        stat = self.do(self.queue.stat())
        assert stat.conservation_error == 0, stat
        assert stat.trained == len(self.committed) == len(set(self.committed))
        assert min(stat.queued_bytes, stat.in_flight, stat.queued, stat.admission_room) >= 0


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_the_memory_backend_conserves_every_group(runner: asyncio.Runner) -> None:
    machine = type("MemoryMachine", (ReplayMachine,), {"runner": runner})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def test_redis_does_what_the_memory_backend_does(runner: asyncio.Runner, redis_process: RedisProcess) -> None:
    """Both backends get every call; their answers and their numbers are the same. Leases only run out in memory."""
    client = runner.run(_connected(redis_process))

    class Twin:
        """Calls Redis after the memory backend and compares. Order among equals (freshest) may differ."""

        def __init__(self, memory: MemoryReplayQueue, on_redis: RedisReplayQueue) -> None:
            self.memory, self.on_redis, self.config = memory, on_redis, memory.config

        def __getattr__(self, name: str) -> Any:
            async def call(*arguments: Any) -> Any:
                try:
                    expected = await getattr(self.memory, name)(*arguments)
                except Fenced:
                    with pytest.raises(Fenced):
                        await getattr(self.on_redis, name)(*arguments)
                    raise
                answer = await getattr(self.on_redis, name)(*arguments)
                assert answer == expected, name
                return answer

            return call

    class TwinMachine(ReplayMachine):
        def queues(self, config: ReplayConfig) -> tuple[Any, Any]:
            store = MemoryStore(lambda: 0.0)
            self.do(client.flushdb())
            first, second = (
                Twin(MemoryReplayQueue(store, config), RedisReplayQueue(client, "property", config)) for _ in range(2)
            )
            return first, second

    machine = type("BoundTwinMachine", (TwinMachine,), {"runner": runner})
    relaxed = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    try:
        run_state_machine_as_test(machine, settings=relaxed)
    finally:
        runner.run(client.aclose())


async def _connected(server: RedisProcess) -> Any:
    return connect(RedisConfig(url=server.url))
