"""The batch reader over the in-memory queue: what it drops, what it passes over, and that it never reads twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups import make_group

from penstock.codec import encode_group
from penstock.config.learner import LearnerConfig
from penstock.config.service import ReplayConfig
from penstock.errors import DeadlineExceeded
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock.replay.memory_store import MemoryStore
from penstock_learner.batch_reader import BatchReader
from penstock_learner.ledger import Ledger

LEARNER = LearnerConfig(batch_timeout_s=0.05)


async def filled_queue(rewards: list[list[float]], **replay: Any) -> MemoryReplayQueue:
    """A queue of one group for each list of rewards, all of version 0; the learner's term is taken."""
    config = ReplayConfig(**{"groups_per_step": 2, "max_staleness": 9} | replay)
    queue = MemoryReplayQueue(MemoryStore(), config)
    await queue.submit([b""] * len(rewards), [0] * len(rewards), "")
    for lease, of_group in zip(await queue.lease("s", len(rewards)), rewards, strict=True):
        group = make_group(lease.prompt_id, num_samples=len(of_group))
        samples = [replace(t, reward=r) for t, r in zip(group.trajectories, of_group, strict=True)]
        await queue.append(lease, encode_group(replace(group, trajectories=tuple(samples))), 0)
    await queue.take_term(0)
    return queue


def reader_of(
    queue: MemoryReplayQueue, ledger: Ledger | None = None, manifests: dict[int, list[int]] | None = None
) -> BatchReader:
    return BatchReader(queue, queue.config, LEARNER, Ledger() if ledger is None else ledger, manifests or {})


async def test_dynamic_sampling_replaces_groups_without_spread() -> None:
    queue = await filled_queue([[1, 1], [0, 1], [0, 0], [1, 0], [1]], dynamic_sampling=True)
    reader = reader_of(queue)
    assert (await reader.read(1, 0)).prompt_ids == [2, 4]
    assert await queue.expired_reasons() == {"no_spread": 2}
    stat = await queue.stat()
    assert (stat.discarded, stat.expired, stat.delivered, stat.conservation_error) == (2, 2, 2, 0)
    with pytest.raises(DeadlineExceeded):
        await reader.read(2, 0)
    assert (await queue.stat()).discarded == 2, "a single sample has no spread to miss"


async def test_without_it_they_are_trained() -> None:
    queue = await filled_queue([[1, 1], [0, 0]])
    assert (await reader_of(queue).read(1, 0)).prompt_ids == [1, 2]


async def test_a_successor_completes_the_same_batch_where_groups_were_discarded() -> None:
    queue = await filled_queue([[1, 1], [0, 1], [1, 0]], dynamic_sampling=True)
    expected = (await reader_of(queue).read(1, 0)).prompt_ids
    successor = MemoryReplayQueue(queue.store, queue.config)
    await successor.take_term(0)
    manifests = await successor.restore(0)
    assert manifests == {1: [1, 2, 3]}
    assert (await reader_of(successor, manifests=manifests).read(1, 0)).prompt_ids == expected == [2, 3]


async def test_drop_expires_what_is_too_old_and_correct_trains_it() -> None:
    queue = await filled_queue([[0, 1], [0, 1]], stale_policy="drop", max_staleness=1)
    with pytest.raises(DeadlineExceeded):
        await reader_of(queue).read(1, 2)
    assert await queue.expired_reasons() == {"stale": 2}
    assert (await queue.stat()).pending == 2
    queue = await filled_queue([[0, 1], [0, 1]], stale_policy="correct", max_staleness=1)
    assert (await reader_of(queue).read(1, 2)).prompt_ids == [1, 2]


async def test_a_group_that_redis_brings_back_is_in_no_second_batch() -> None:
    """Its take was lost with Redis' tail. It is acknowledged only once a checkpoint covers it."""
    queue = await filled_queue([[0, 1]] * 4)
    ledger = Ledger()
    reader = reader_of(queue, ledger)

    def bring_back(*prompt_ids: int) -> None:
        for prompt_id in prompt_ids:
            queue.store.delivered.remove(prompt_id)
            queue.store.make_ready(prompt_id)

    assert (await reader.read(1, 0)).prompt_ids == [1, 2]
    bring_back(1)
    assert (await reader.read(2, 0)).prompt_ids == [3, 4]
    ledger.add([1, 2, 3, 4])
    bring_back(1, 2)
    with pytest.raises(DeadlineExceeded):
        await reader.read(3, 0)
    assert (await queue.stat()).trained == 0, "no checkpoint covers them yet"
    ledger.mark_durable()
    bring_back(1, 2)
    with pytest.raises(DeadlineExceeded):
        await reader.read(3, 0)
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.conservation_error) == (2, 2, 0)
