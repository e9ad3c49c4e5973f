"""A rewind while a batch is read ahead: afterwards the batch is the one that a new read would give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.codec import encode_group
from penstock.config.learner import LearnerConfig
from penstock.config.service import ReplayConfig
from penstock.errors import DeadlineExceeded
from penstock.trajectory import Group
from penstock_learner.loop.batches import BatchAhead, BatchReader
from penstock_learner.steps.program import TrainingStep
from penstock_learner.term import Rewind, Term
from support.groups import made_by
from support.learner_ranks import make_step
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import assert_conserved, queue_with

pytestmark = pytest.mark.usefixtures("one_rank")
VERSION = 5
"""The version for which the batch is read ahead."""
TO_3 = Rewind(from_version=3, to_version=6)


@pytest.fixture
def training(tiny_models: dict[str, Path]) -> TrainingStep:
    """A training step with a reference, whose log-probs are computed ahead."""
    return make_step(tiny_models, algorithm={"kl": {"placement": "loss"}})


class Setting:
    """A queue with two groups per step, and its reader. Follows rewinds as the controller does."""

    def __init__(self, queue: MemoryReplayQueue, training: TrainingStep, timeout_s: float) -> None:
        self.queue = queue
        self.training = training
        learner = LearnerConfig(batch_timeout_s=timeout_s)
        self.reader = BatchReader(queue, queue.config, learner, Term())

    @classmethod
    async def of(cls, groups: list[Group], training: TrainingStep, timeout_s: float = 10.0, **replay: Any) -> Setting:
        config = ReplayConfig(**{"groups_per_step": 2, "max_staleness": 10, **replay})
        return cls(await queue_with(config, groups), training, timeout_s)

    def begin(self) -> BatchAhead:
        return BatchAhead.begin(self.reader, self.training, 1, VERSION)

    def rewind(self, ahead: BatchAhead, rewind: Rewind) -> BatchAhead:
        self.reader.term.rewind(rewind.from_version, rewind.to_version, rewind.why)
        return ahead.replaced_by(self.training, self.reader.replace_outdated)

    async def answer_again(self, *versions: int) -> None:
        """Answer every pending prompt, each with one of these versions, in order."""
        for version, lease in zip(versions, await self.queue.lease("s", len(versions)), strict=True):
            await self.queue.append(lease, encode_group(made_by(lease.prompt_id, version)), version)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_batch_that_is_still_wanted_is_neither_read_nor_computed_again(training: TrainingStep) -> None:
    setting = await Setting.of([made_by(1, 3), made_by(2, 2, 3), made_by(3, 3)], training)
    ahead = setting.begin()
    computed = await ahead.forwards
    again = setting.rewind(ahead, TO_3)
    assert await again.reading is await ahead.reading
    assert await again.forwards is computed
    assert (await setting.queue.stat()).expired == 0


@pytest.mark.parametrize("was_read", [True, False], ids=["after it was computed", "while it was read"])
async def test_groups_of_versions_that_were_abandoned_are_replaced(was_read: bool, training: TrainingStep) -> None:
    """Versions 4 and 5 are given up. The reference's log-probs are those of the groups that replace theirs."""
    setting = await Setting.of([made_by(1, 3, 4), made_by(2, 3)] if was_read else [made_by(1, 3, 4)], training)
    ahead = setting.begin()
    if was_read:
        await ahead.forwards
    else:
        await until(lambda: 1 in setting.queue.store.delivered)
        await setting.queue.submit([b""], [0], "")
    again = setting.rewind(ahead, TO_3)
    if not was_read:
        await setting.answer_again(3)
    await until(lambda: 1 in setting.queue.store.pending)
    await setting.answer_again(6)
    batch = await again.reading
    assert [(group.prompt_id, group.min_version, group.max_version) for group in batch.groups] == [(2, 3, 3), (1, 6, 6)]
    expected = await training.ahead(batch.groups)
    np.testing.assert_array_equal((await again.forwards)["reference_log_probs"], expected["reference_log_probs"])
    assert (await setting.queue.stat()).expired == 1
    await assert_conserved(setting.queue)


async def test_the_new_number_makes_no_group_older(training: TrainingStep) -> None:
    """Version 2 is 3 steps older than version 5, and 1 step older than version 6, which has the weights of 3."""
    groups = [made_by(1, 2), made_by(2, 3), made_by(3, 3)]
    setting = await Setting.of(groups, training, stale_policy="drop", max_staleness=3)
    ahead = setting.begin()
    assert (await ahead.reading).prompt_ids == [1, 2]
    again = setting.rewind(ahead, TO_3)
    assert (await again.reading).prompt_ids == [1, 2]
    await again.forwards


async def test_a_second_rewind_counts_for_what_replaced_the_groups_of_the_first(training: TrainingStep) -> None:
    setting = await Setting.of([made_by(1, 4), made_by(2, 5)], training)
    ahead = setting.begin()
    await ahead.reading
    first = setting.rewind(ahead, TO_3)
    await until(lambda: len(setting.queue.store.pending) == 2)
    await setting.answer_again(3)
    await until(lambda: 1 in setting.queue.store.delivered)
    second = setting.rewind(first, Rewind(from_version=2, to_version=7))
    await setting.answer_again(2)
    await until(lambda: 1 in setting.queue.store.pending)
    await setting.answer_again(7)
    batch = await second.reading
    assert {group.prompt_id: group.min_version for group in batch.groups} == {2: 2, 1: 7}
    await second.forwards
    await assert_conserved(setting.queue)


async def test_groups_that_no_server_replaces_have_a_deadline_once_the_batch_is_wanted(training: TrainingStep) -> None:
    setting = await Setting.of([made_by(1, 4), made_by(2, 5)], training, timeout_s=0.05)
    ahead = setting.begin()
    await ahead.reading
    again = setting.rewind(ahead, TO_3)
    await asyncio.wait({again.reading}, timeout=0.3)
    assert not again.reading.done(), "training may be told to do something else meanwhile"
    again.wanted.set()
    with pytest.raises(DeadlineExceeded, match="step 1 has 0 of 2 groups"):
        await again.reading
    await again.end()


@pytest.mark.parametrize("was_read", [True, False], ids=["while others are awaited", "while it is read"])
async def test_ending_a_batch_leaves_no_task_running(was_read: bool, tiny_models: dict[str, Path]) -> None:
    """The reference's forward pass never ends by itself here. It must be ended too."""
    training = make_step(tiny_models, {"forward": asyncio.Barrier(2)}, algorithm={"kl": {"placement": "loss"}})
    setting = await Setting.of([made_by(1, 4), made_by(2, 5)] if was_read else [made_by(1, 4)], training)
    others = asyncio.all_tasks()
    ahead = setting.begin()
    await until(lambda: 1 in setting.queue.store.delivered)
    again = setting.rewind(ahead, TO_3)
    if was_read:
        await until(lambda: 1 in setting.queue.store.pending)
    await again.end()
    assert asyncio.all_tasks() == others
