"""Random operations on the replay queue: after each one, nothing is lost and the limiter agrees with its formula."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
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

from penstock.config.service import BreakerConfig, RedisConfig, ReplayConfig
from penstock.errors import Fenced
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease, OfferedGroup, Origin, SavedTokens
from penstock.replay.results import PromptBook
from penstock.store.fleet import PolicyRegistry, RunControl
from penstock.store.keys import RunKeys
from penstock.store.redis_client import connect
from support.groups import made_by
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore
from support.redis_server import RedisProcess

LEASE_TTL_S = 600.0
"""Leases are much longer than a test, so they expire only when the test calls `pass_time`."""
RUN = "property"
CONFIGS = [
    ReplayConfig(
        groups_per_step=2, max_staleness=1, max_attempts=2, stale_policy=policy, selection=selection,
        lease_ttl_s=LEASE_TTL_S, capacity_bytes=2**20,
    )
    for policy, selection in (("wait", "fifo"), ("drop", "fifo"), ("correct", "freshest"))
]  # fmt: skip
CONFIGS.append(CONFIGS[0].model_copy(update={"breaker": BreakerConfig(failures=4, probe_s=LEASE_TTL_S)}))
EVALUATION = "held-out-1"
NUM_KEPT = 2
"""Steps that the learner can rewind: how long it keeps checkpoints."""
PASSED_S = st.sampled_from([1.0, LEASE_TTL_S + 1])
indices = st.integers(0, 7)


class MemoryOperator:
    """Acts as the operator and the fleet of a run, in the store of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    async def pause(self) -> None:
        self.store.is_paused = True

    async def resume(self) -> None:
        self.store.is_paused = False
        self.store.breakers.clear()

    async def drain(self, server: str) -> None:
        self.store.drained.add(server)

    async def undrain(self, server: str) -> None:
        self.store.drained.discard(server)

    async def pin(self, name: str, version: int) -> None:
        self.store.pins[name] = version

    async def unpin(self, name: str) -> None:
        self.store.pins.pop(name, None)

    async def report(self, server: str, version: int) -> None:
        self.store.served_versions[server] = version


class RedisOperator:
    """Acts as the operator and the fleet of a run, through the classes that write to Redis."""

    def __init__(self, client: Any) -> None:
        self.client, self.keys = client, RunKeys(RUN)
        self.control, self.policies = RunControl(client, RUN), PolicyRegistry(client, RUN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.control if name in ("pause", "resume", "drain", "undrain") else self.policies, name)

    async def report(self, server: str, version: int) -> None:
        await self.client.hset(self.keys.servers, server, json.dumps({"policy_version": version}))

    async def pass_time(self, seconds: float) -> None:
        """Move the deadlines of the leases nearer, because the clock of Redis cannot be changed."""
        for key in (self.keys.leases, self.keys.eval_leases):
            for member in await self.client.zrange(key, 0, -1):
                await self.client.zincrby(key, -1000 * seconds, member)
        for server, text in (await self.client.hgetall(self.keys.breakers)).items():
            record = json.loads(text)
            if record["opened_ms"]:
                record["probe_ms"] -= int(1000 * seconds)
                await self.client.hset(self.keys.breakers, server, json.dumps(record))


class ReplayMachine(RuleBasedStateMachine):
    """Two rollout servers, a learner, a fenced predecessor and an operator, which act in any order."""

    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0
        self.held: list[tuple[str, Lease]] = []
        """Every lease ever granted: a server may act on one long after it was lost."""
        self.held_out: list[tuple[str, Lease]] = []
        """Every lease of an evaluation prompt."""
        self.taken: list[int] = []
        self.committed: list[int] = []
        self.committed_at: dict[int, int] = {}
        """Step of the commit of each prompt."""
        self.step = 0

    def queues(self, config: ReplayConfig) -> tuple[Any, Any]:
        """The queues of the learner and of its predecessor."""
        self.store = MemoryStore(lambda: self.time_s)
        return MemoryReplayQueue(self.store, config), MemoryReplayQueue(self.store, config)

    def order(self, name: str, *arguments: Any) -> None:
        """Apply an order of the operator, or a report of a server."""
        self.do(getattr(MemoryOperator(self.store), name)(*arguments))

    def do(self, call: Any) -> Any:
        return self.runner.run(call)

    @initialize(
        config=st.sampled_from(CONFIGS),
        finished=st.permutations(range(4)),
        pinned=st.sampled_from(["", "a", EVALUATION]),
    )
    def start(self, config: ReplayConfig, finished: list[int], pinned: str) -> None:
        """Start with six prompts, four of them leased and three finished in any order, and two held-out prompts."""
        self.queue, self.zombie = self.queues(config)
        self.do(self.zombie.take_term(0))
        self.do(self.queue.take_term(0))
        self.submit([0, 0, 0, 1, 0, 0])
        self.lease("a", 4)
        for index in finished[:3]:
            self.append(index, 1, 0)
        self.evaluate(2)
        if pinned:
            self.order("pin", pinned, 1)

    @rule(priorities=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def submit(self, priorities: list[int]) -> None:
        self.do(self.queue.submit([b"p"] * len(priorities), priorities, ""))

    @rule(server=st.sampled_from(["a", "b"]), count=st.integers(1, 4))
    def lease(self, server: str, count: int) -> None:
        before = self.do(self.queue.stat())
        is_open = self.store.open_breaker(server) is not None
        leases = self.do(self.queue.lease(server, count))
        after = self.do(self.queue.stat())
        gained = after.admitted - before.admitted
        freed = after.dead_lettered - before.dead_lettered
        assert gained <= before.admission_room + freed
        if self.store.is_paused or server in self.store.drained:
            assert leases == []
        elif is_open:
            assert len(leases) <= 1
        elif server in self.store.pins:
            assert gained == 0 and {lease.payload for lease in leases} <= {b"held out"}
        elif len(leases) < count and after.queued_bytes < self.queue.config.capacity_bytes:
            assert after.pending_prompts == 0 or after.admission_room == 0
        self.held += [(server, lease) for lease in leases if lease.payload != b"held out"]
        self.held_out += [(server, lease) for lease in leases if lease.payload == b"held out"]

    @precondition(lambda self: self.held)
    @rule(index=indices, size=st.sampled_from([1, 400_000]), version=st.integers(0, 3))
    def append(self, index: int, size: int, version: int) -> None:
        _, lease = self.held[index % len(self.held)]
        self.do(self.queue.append(lease, b"g" * size, version))

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), version=st.integers(0, 3))
    def accept(self, numbers: list[int], version: int) -> None:
        """Offer groups that no server has leased. A number that comes again is the same group."""
        group = replace(made_by(1, version), run=RUN)
        offered = [OfferedGroup(number, b"p", 0, group) for number in numbers]
        accepted = self.do(self.queue.accept(offered, Origin("import", "key")))
        assert len({prompt_id for prompt_id, _ in accepted}) == len(numbers)

    @precondition(lambda self: self.held)
    @rule(index=indices, failure=st.sampled_from(["", "oops", "oops"]), forget_saved=st.booleans())
    def give_back(self, index: int, failure: str, forget_saved: bool) -> None:
        server, lease = self.held[index % len(self.held)]
        self.do(self.queue.give_back(server, lease, failure, forget_saved=forget_saved))

    @precondition(lambda self: self.held or self.held_out)
    @rule(index=indices, sample=st.integers(0, 1), start=st.sampled_from([0, 256]), size=st.sampled_from([9, 150_000]))
    def save_tokens(self, index: int, sample: int, start: int, size: int) -> None:
        held = self.held + self.held_out
        server, lease = held[index % len(held)]
        pieces = [(lease, SavedTokens(sample, start, b"t" * size)), (lease, SavedTokens(sample, start + 1, b"t"))]
        self.do(self.queue.save_tokens(server, pieces))

    @precondition(lambda self: self.held or self.held_out)
    @rule(index=indices, forget=st.booleans())
    def read_saved_tokens(self, index: int, forget: bool) -> None:
        held = self.held + self.held_out
        server, lease = held[index % len(held)]
        self.do(self.queue.saved_tokens(lease))
        if forget:
            self.do(self.queue.forget_tokens(server, lease))

    @precondition(lambda self: self.held)
    @rule(index=indices)
    def heartbeat(self, index: int) -> None:
        server, lease = self.held[index % len(self.held)]
        self.do(self.queue.heartbeat(server, [lease]))

    @rule(seconds=PASSED_S)
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

    @rule(change=st.sampled_from(["pause", "resume", "resume"]))
    def pause_or_resume(self, change: str) -> None:
        self.order(change)

    @rule(server=st.sampled_from(["a", "b"]), change=st.sampled_from(["drain", "undrain", "undrain"]))
    def drain_or_undrain(self, server: str, change: str) -> None:
        self.order(change, server)

    @rule(name=st.sampled_from(["a", "b", EVALUATION]), version=st.sampled_from([None, None, 0, 1]))
    def pin_or_unpin(self, name: str, version: int | None) -> None:
        self.order("unpin", name) if version is None else self.order("pin", name, version)

    @rule(server=st.sampled_from(["a", "b"]), version=st.integers(0, 1))
    def report_a_version(self, server: str, version: int) -> None:
        self.order("report", server, version)

    @rule(num_prompts=st.integers(1, 3))
    def evaluate(self, num_prompts: int) -> None:
        """Only the first call creates the evaluation."""
        self.do(self.queue.create_evaluation(EVALUATION, [b"held out"] * num_prompts))

    @precondition(lambda self: self.held_out)
    @rule(index=indices, is_answered=st.booleans())
    def end_an_evaluation_prompt(self, index: int, is_answered: bool) -> None:
        server, lease = self.held_out[index % len(self.held_out)]
        if is_answered:
            self.do(self.queue.record_evaluation(EVALUATION, lease, [1.0], 0, 0))
        else:
            self.do(self.queue.give_back(server, lease, "oops"))
        self.do(self.queue.get_evaluation(EVALUATION))

    @rule(prompt_ids=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
    def cancel(self, prompt_ids: list[int]) -> None:
        for prompt_id, status in zip(prompt_ids, self.do(self.queue.cancel(prompt_ids)), strict=True):
            if status is not None and status.state == "queued":
                assert prompt_id in self.store.delivered, "only the groups that the learner has taken stay"

    @precondition(lambda self: self.taken)
    @rule(index=indices, how=st.sampled_from(["expire", "discard", "dead_letter"]))
    def drop(self, index: int, how: str) -> None:
        prompt_id = self.taken.pop(index % len(self.taken))
        if how == "expire":
            self.do(self.queue.expire(prompt_id))
        else:
            self.do(getattr(self.queue, how)(prompt_id, "reason"))

    @rule(is_ahead=st.booleans())
    def train(self, is_ahead: bool) -> None:
        """Train what was taken. A learner that reads ahead takes the next batch before it commits this one."""
        self.step += 1
        ahead = self.do(self.queue.take(self.step + 1, 2)) if is_ahead else []
        self.do(self.queue.publish(self.step, self.step, b""))
        oldest_step = max(0, self.step - NUM_KEPT)
        assert self.do(self.queue.commit(self.step, self.taken, oldest_step)) == len(self.taken)
        self.committed += self.taken
        self.committed_at |= dict.fromkeys(self.taken, self.step)
        self.taken = ahead

    @rule()
    def restart_the_learner(self) -> None:
        self.do(self.queue.take_term(0))
        manifests = self.do(self.queue.rewind_step(self.step, len(self.committed)))
        assert {i for ids in manifests.values() for i in ids} >= set(self.taken)

    @rule(num_steps=st.integers(0, NUM_KEPT + 1))
    def rewind(self, num_steps: int) -> None:
        """A new learner rewinds some steps. A repetition changes nothing."""
        step = max(0, self.step - num_steps)
        abandoned = [prompt_id for prompt_id in self.committed if self.committed_at[prompt_id] > step]
        self.do(self.queue.take_term(0))
        if step < self.do(self.queue.committed()).kept_after:
            return
        self.do(self.queue.rewind("checkpoint", step, abandoned))
        stat = self.do(self.queue.stat())
        self.do(self.queue.rewind("checkpoint", step, []))
        assert self.do(self.queue.stat()) == stat and stat.delivered == 0
        assert self.do(self.queue.committed()).step == step
        for prompt_id in abandoned:
            assert self.do(self.queue.get_prompt(prompt_id)).state == "pending"
        self.step, self.taken = step, []
        self.committed = [prompt_id for prompt_id in self.committed if prompt_id not in abandoned]

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

    @invariant()
    def saved_while_in_flight(self) -> None:
        """Only prompts in flight have saved tokens, within the limit and counted."""
        store = self.store
        places = (store.leases, store.returned, store.eval_leases, store.eval_pending)
        sizes = {i: sum(map(len, prompt.saved.values())) for i, prompt in store.prompts.items() if prompt.saved}
        assert all(any(prompt_id in place for place in places) for prompt_id in sizes)
        assert self.do(self.queue.stat()).saved_bytes == sum(sizes.values()) <= self.queue.config.capacity_bytes // 4

    @invariant()
    def listed_once(self) -> None:
        """The manifests hold what the learner has taken: no group that was dropped, and none twice."""
        listed = [prompt_id for ids in self.manifests().values() for prompt_id in ids]
        assert sorted(listed) == sorted(self.store.delivered)
        assert set(self.taken) <= self.store.delivered

    def manifests(self) -> dict[int, list[int]]:
        return self.store.manifests


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_the_memory_backend_conserves_every_group(runner: asyncio.Runner) -> None:
    machine = type("MemoryMachine", (ReplayMachine,), {"runner": runner})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def test_redis_does_what_the_memory_backend_does(runner: asyncio.Runner, redis_process: RedisProcess) -> None:
    """Both backends get every call, and give the same answers and statistics."""
    client = runner.run(_connected(redis_process))

    class Twin:
        """Calls both backends and compares the answers. The order of equal groups (freshest) may differ."""

        def __init__(self, memory: MemoryReplayQueue, on_redis: RedisReplayQueue) -> None:
            self.memory, self.on_redis, self.config = memory, on_redis, memory.config

        def __getattr__(self, name: str) -> Any:
            on_redis = getattr(PromptBook(self.on_redis.client, RUN) if name == "cancel" else self.on_redis, name)

            async def call(*arguments: Any, **named: Any) -> Any:
                try:
                    expected = await getattr(self.memory, name)(*arguments, **named)
                except Fenced:
                    with pytest.raises(Fenced):
                        await on_redis(*arguments, **named)
                    raise
                answer = await on_redis(*arguments, **named)
                assert answer == expected, name
                return answer

            return call

    class TwinMachine(ReplayMachine):
        def queues(self, config: ReplayConfig) -> tuple[Any, Any]:
            self.do(client.flushdb())
            first, second = (Twin(memory, RedisReplayQueue(client, RUN, config)) for memory in super().queues(config))
            return first, second

        def manifests(self) -> dict[int, list[int]]:
            stored = self.do(client.hgetall(RunKeys(RUN).manifests))
            on_redis = {int(step): [int(word) for word in ids.split()] for step, ids in stored.items()}
            assert on_redis == super().manifests()
            return on_redis

        def order(self, name: str, *arguments: Any) -> None:
            super().order(name, *arguments)
            self.do(getattr(RedisOperator(client), name)(*arguments))

        @rule(seconds=PASSED_S)
        def pass_time(self, seconds: float) -> None:
            super().pass_time(seconds)
            self.do(RedisOperator(client).pass_time(seconds))

    machine = type("BoundTwinMachine", (TwinMachine,), {"runner": runner})
    relaxed = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    try:
        run_state_machine_as_test(machine, settings=relaxed)
    finally:
        runner.run(client.aclose())


async def _connected(server: RedisProcess) -> Any:
    return connect(RedisConfig(url=server.url))
