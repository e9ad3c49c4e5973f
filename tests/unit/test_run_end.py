"""The plan of a run in one line, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.config.service import ReplayConfig
from penstock.feed.run_end import EarlierWork, RunEnd, earlier_work, plan_line
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore


def make_config(num_steps: int = 0, **dataset: Any) -> RunConfig:
    fields: dict[str, Any] = {"file": "train.parquet"} | dataset
    return validate(
        {
            "model": {"path": "m"}, "dataset": fields, "replay": {"groups_per_step": 64},
            "learner": {"num_steps": num_steps},
        },
        "test",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_steps", "dataset", "line"),
    [
        (0, {}, "plan: 117 steps of 64 prompts from 1 epoch of 7473 prompts; the last step has 49"),
        (
            0, {"last_batch": "drop"},
            "plan: 116 steps of 64 prompts from 1 epoch of 7473 prompts; the last 49 are dropped",
        ),
        (
            100, {},
            "plan: 100 steps of 64 prompts (learner.num_steps), although 1 epoch of 7473 prompts are enough for 117 "
            "steps",
        ),
        (
            200, {},
            "plan: 117 steps of 64 prompts from 1 epoch of 7473 prompts, which end before learner.num_steps 200; "
            "the last step has 49",
        ),
        (0, {"epochs": 64}, "plan: 7473 steps of 64 prompts from 64 epochs of 7473 prompts"),
        (
            10, {"epochs": 0},
            "plan: 10 steps of 64 prompts from the dataset of 7473 prompts, repeated without end (dataset.epochs)",
        ),
        (
            0, {"epochs": 0},
            "plan: train until stopped on the dataset of 7473 prompts, repeated without end (dataset.epochs)",
        ),
        (
            9, {"validation": {"file": "v.parquet", "only": True}},
            "plan: validate and finish, without training (dataset.validation.only)",
        ),
    ],
)  # fmt: skip
def test_the_plan_compares_steps_and_epochs(num_steps: int, dataset: dict[str, Any], line: str) -> None:
    assert plan_line(make_config(num_steps, **dataset), 7473) == line


@pytest.mark.parametrize(
    ("num_steps", "dataset", "earlier", "line"),
    [
        (
            0, {}, EarlierWork(0, 192),
            "plan: 4 steps of 64 prompts from 1 epoch of 64 prompts and 192 prompts that are queued already",
        ),
        (
            12, {}, EarlierWork(10, 192),
            "plan: 2 more steps of 64 prompts (learner.num_steps), although 1 epoch of 64 prompts and 192 prompts that "
            "are queued already are enough for 4 steps",
        ),
        (
            12, {"epochs": 0}, EarlierWork(10, 5),
            "plan: 2 more steps of 64 prompts from the dataset of 64 prompts, repeated without end (dataset.epochs), "
            "and 5 prompts that are queued already",
        ),
        (12, {}, EarlierWork(12, 0), "plan: no step, because the run is at step 12 of learner.num_steps 12"),
    ],
)  # fmt: skip
def test_the_plan_of_a_second_dataset_counts_what_the_run_has(
    num_steps: int, dataset: dict[str, Any], earlier: EarlierWork, line: str
) -> None:
    assert plan_line(make_config(num_steps, **dataset), 64, earlier) == line


async def test_prompts_of_others_are_counted_until_the_dataset_has_begun() -> None:
    config = make_config()
    queue = MemoryReplayQueue(MemoryStore(), config.replay)
    await queue.take_term(0)
    assert await earlier_work(queue, config) == EarlierWork(0, 0)
    await queue.feed("other", "f", 0, [b"p"] * 70, [0] * 70, 70)
    leases = await queue.lease("s", 65)
    for lease in leases:
        await queue.append(lease, b"g", 0)
    await queue.take(1, 64)
    await queue.publish(1, 1, b"")  # trained, and no checkpoint covers it yet
    assert await earlier_work(queue, config) == EarlierWork(1, 6)
    await queue.feed(config.dataset.name, "f", 0, [b"p"], [0], 1)
    assert await earlier_work(queue, config) == EarlierWork()


async def test_a_run_that_finished_has_not_ended_once_it_is_asked_for_more() -> None:
    queue = MemoryReplayQueue(MemoryStore(), ReplayConfig())
    await queue.take_term(0)
    assert not await RunEnd(queue, make_config()).is_reached()
    await queue.finish(0)
    await queue.feed("train", "f", 0, [b"p"] * 3, [0] * 3, 3)
    assert not await RunEnd(queue, make_config()).is_reached(), "its prompts are pending"
    assert await RunEnd(queue, make_config(validation={"file": "v.parquet", "only": True})).is_reached()
    for lease in await queue.lease("s", 3):
        await queue.give_back("s", lease, "unreadable", is_final=True)
    assert await RunEnd(queue, make_config()).is_reached()
    assert not await RunEnd(queue, make_config(epochs=2)).is_reached()
    await queue.publish(1, 1, b"")
    assert not await RunEnd(queue, make_config()).is_reached()
    assert not await RunEnd(queue, make_config(num_steps=1)).is_reached()
    await queue.finish(1)
    assert await RunEnd(queue, make_config(num_steps=1, epochs=0)).is_reached()
