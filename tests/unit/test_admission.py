"""The admission formula, and the same formula as the queue applies it."""

from __future__ import annotations

import doctest
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.config.service import ReplayConfig
from penstock.replay import queue_types as admission_module
from penstock.replay.queue_types import Lease, admission
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

counts = st.integers(0, 50)


def test_the_example_holds() -> None:
    assert doctest.testmod(admission_module).failed == 0


@given(counts, counts, counts, counts, st.integers(0, 4), st.integers(1, 8))
def test_admission_is_a_rate_limiter(
    step: int, trained: int, queued: int, in_flight: int, max_staleness: int, groups_per_step: int
) -> None:
    state = admission(
        step=step, trained=trained, queued=queued, in_flight=in_flight, max_staleness=max_staleness,
        groups_per_step=groups_per_step,
    )  # fmt: skip
    difference = trained + queued + in_flight - step * groups_per_step
    assert state.room == max(0, (max_staleness + 1) * groups_per_step - difference)
    assert state.limit == (max_staleness + step + 1) * groups_per_step


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3))
async def test_a_queue_leases_as_many_as_the_formula_says(max_staleness: int, groups_per_step: int, step: int) -> None:
    queue = MemoryReplayQueue(MemoryStore(), ReplayConfig(groups_per_step=groups_per_step, max_staleness=max_staleness))
    await queue.submit([b""] * 100, [0] * 100, "")
    await queue.take_term(0)
    await queue.publish(step, step, b"")
    assert len(await queue.lease("s", 100)) == (max_staleness + step + 1) * groups_per_step


async def test_leases_run_out_by_the_clock_of_the_store() -> None:
    now = [0.0]
    queue = MemoryReplayQueue(MemoryStore(lambda: now[0]), ReplayConfig(lease_ttl_s=10))
    await queue.submit([b"p"], [0], "")
    [first] = await queue.lease("dies", 1)
    now[0] = 9.0
    assert await queue.heartbeat("dies", [first]) == []
    now[0] = 18.0
    assert await queue.lease("lives", 1) == []
    now[0] = 20.0
    [second] = await queue.lease("lives", 1)
    assert (second.prompt_id, second.attempt) == (first.prompt_id, 2)


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2**32))
async def test_wait_holds_the_staleness_bound_whatever_straggles(
    max_staleness: int, groups_per_step: int, seed: int
) -> None:
    queue = MemoryReplayQueue(MemoryStore(), config_of(groups_per_step, max_staleness))
    await queue.submit([b""] * 60, [0] * 60, "")
    await queue.take_term(0)
    assert await train(queue, Random(seed), range(6), {}) == 0, "no group was too old"


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32))
async def test_another_number_of_groups_per_step_neither_stalls_a_run_nor_lets_groups_age(
    max_staleness: int, before: int, after: int, seed: int
) -> None:
    """Groups that were admitted for larger steps are dropped when they are too old. No others are."""
    store, random, started = MemoryStore(), Random(seed), dict[int, int]()
    first = MemoryReplayQueue(store, config_of(before, max_staleness))
    await first.submit([b""] * 150, [0] * 150, "")
    await first.take_term(0)
    await train(first, random, range(4), started)
    second = MemoryReplayQueue(store, config_of(after, max_staleness))
    await second.take_term(0)
    await second.rewind_step(4, 4 * before)
    num_dropped = await train(second, random, range(4, 10), started)
    assert num_dropped <= max(0, before - after) * (max_staleness + 1)


def config_of(groups_per_step: int, max_staleness: int) -> ReplayConfig:
    return ReplayConfig(groups_per_step=groups_per_step, max_staleness=max_staleness, stale_policy="wait")


async def train(queue: MemoryReplayQueue, random: Random, steps: range, started: dict[int, int]) -> int:
    """Train these steps. Returns how many groups were too old, and were dropped. Versions are steps. Prompts start with
    the current version and finish in any order, some after a loss."""
    config, running = queue.config, list[tuple[Lease, int]]()
    step, batch, num_dropped, num_rounds = steps[0], list[int](), 0, 0
    while step < steps.stop:
        num_rounds += 1
        assert num_rounds < 1000, "the run stalls"
        running += [(lease, step) for lease in await queue.lease("s", random.randint(1, 4))]
        random.shuffle(running)
        if running:
            lease, version = running.pop()
            if random.random() < 0.2:
                await queue.give_back("s", lease)
            else:
                await queue.append(lease, b"g", version)
                started[lease.prompt_id] = version
        for prompt_id in await queue.take(step + 1, config.groups_per_step - len(batch)):
            if step - started[prompt_id] > config.max_staleness:
                num_dropped += 1
                await queue.expire(prompt_id)
            elif random.random() < 0.1:
                await queue.discard(prompt_id, "no_spread")
            else:
                batch.append(prompt_id)
        if len(batch) == config.groups_per_step:
            step += 1
            await queue.commit(step, batch)
            await queue.publish(step, step, b"")
            batch = []
    for lease, version in running:
        await queue.append(lease, b"g", version)
        started[lease.prompt_id] = version
    return num_dropped
