"""A dataset whose prompts are dead-lettered pauses or ends the run, instead of being used up in silence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cancellation import end_task
from penstock.config.dataset import DatasetConfig
from penstock.config.service import ReplayConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.feed.dataset_feed import MIN_DEAD_LETTERS, DeadLetterShare, Feeder, PromptStream
from penstock.trajectory import Prompt
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

TOO_LONG = "prompt_too_long"


@pytest.mark.parametrize(
    ("num_inserted", "reasons", "pauses"),
    [
        (0, {TOO_LONG: MIN_DEAD_LETTERS}, True),
        (0, {TOO_LONG: MIN_DEAD_LETTERS - 1}, False),
        (MIN_DEAD_LETTERS, {TOO_LONG: MIN_DEAD_LETTERS}, True),
        (MIN_DEAD_LETTERS + 1, {TOO_LONG: MIN_DEAD_LETTERS}, False),
        (0, {TOO_LONG: MIN_DEAD_LETTERS, "shape": MIN_DEAD_LETTERS + 1}, True),
        (0, {"a": 40, "b": 41, "c": 40}, False),
    ],
)
def test_one_reason_for_half_of_the_prompts_pauses(num_inserted: int, reasons: dict[str, int], pauses: bool) -> None:
    watched = DeadLetterShare(0.5)
    assert watched.reason_to_pause(100, {TOO_LONG: 100}) == "", "earlier dead letters do not count"
    before = {TOO_LONG: 100}
    now = {reason: reasons.get(reason, 0) + before.get(reason, 0) for reason in {*reasons, *before}}
    assert bool(watched.reason_to_pause(100 + num_inserted, now)) == pauses
    assert bool(watched.reason_to_pause(100 + num_inserted, now)) == pauses, "the reason stays until the run is paused"
    watched.begin_again(100 + num_inserted, now)
    assert watched.reason_to_pause(100 + num_inserted, now) == "", "after a pause the count begins anew"
    assert DeadLetterShare(None).reason_to_pause(num_inserted, now) == ""


async def dead_letter(queue: MemoryReplayQueue) -> None:
    """A rollout server that finds every prompt too long."""
    while True:
        for lease in await queue.lease("s", 8):
            await queue.give_back("s", lease, TOO_LONG, is_final=True)
        await asyncio.sleep(0)


def feeder_of(
    queue: MemoryReplayQueue, num_prompts: int, reasons: list[str], epochs: int = 0, max_pending: int = 16,
    weight: float = 1.0,
) -> Feeder:  # fmt: skip
    config = DatasetConfig(file=Path("train.jsonl"), epochs=epochs, max_pending=max_pending)
    prompts = [Prompt(messages=(("user", f"{number}"),)) for number in range(num_prompts)]

    async def pause(reason: str) -> None:
        reasons.append(reason)
        queue.store.is_paused = True

    return Feeder(queue, PromptStream(prompts, config, 1, [(num_prompts, weight)]), pause=pause)


async def test_the_run_pauses_long_before_a_large_dataset_is_dead_lettered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.feed.dataset_feed.POLL_S", 0.001)
    queue, reasons = MemoryReplayQueue(MemoryStore(), ReplayConfig(max_staleness=10**6)), list[str]()
    tasks = [asyncio.create_task(dead_letter(queue)), asyncio.create_task(feeder_of(queue, 10_000, reasons).run())]
    try:
        async with asyncio.timeout(60):
            while not reasons:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
        assert len(reasons) == 1 and "prompts were dead-lettered with prompt_too_long" in reasons[0]
        assert (await queue.stat()).dead_lettered < 200
    finally:
        for task in tasks:
            await end_task(task)


async def test_a_small_dataset_is_watched_after_all_of_it_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its feed ends before the first prompt is tried."""
    monkeypatch.setattr("penstock.feed.dataset_feed.WATCH_S", 0.001)
    queue, reasons = MemoryReplayQueue(MemoryStore(), ReplayConfig(max_staleness=10**6)), list[str]()
    feeder = feeder_of(queue, 2 * MIN_DEAD_LETTERS, reasons, epochs=1, max_pending=1000)
    assert await feeder.run() == 2 * MIN_DEAD_LETTERS and not reasons

    async def is_over() -> bool:
        for lease in await queue.lease("s", 8):
            await queue.give_back("s", lease, TOO_LONG, is_final=True)
        return bool(reasons)

    async with asyncio.timeout(60):
        await feeder.watch(is_over)
    assert (
        f"{MIN_DEAD_LETTERS} of the newest {MIN_DEAD_LETTERS} prompts were dead-lettered with prompt_too_long"
        in reasons[0]
    )


async def test_a_pause_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.feed.dataset_feed.POLL_S", 0.001)
    monkeypatch.setattr("penstock.feed.dataset_feed.RETRY_S", 0.001)
    queue, tried = MemoryReplayQueue(MemoryStore(), ReplayConfig(max_staleness=10**6)), list[str]()
    feeder = feeder_of(queue, 10_000, [])

    async def pause(reason: str) -> None:
        tried.append(reason)
        queue.store.is_paused = True  # no further prompt is leased, so no further one is dead-lettered
        if len(tried) == 1:
            raise Unavailable("Redis does not answer")

    feeder.pause = pause
    tasks = [asyncio.create_task(dead_letter(queue)), asyncio.create_task(feeder.run())]
    try:
        async with asyncio.timeout(60):
            while len(tried) < 2:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(tried) == 2, "a pause that succeeded is not repeated"
    finally:
        for task in tasks:
            await end_task(task)


@pytest.mark.parametrize(("num_prompts", "weight"), [(20, 1.0), (40, 0.5)])
async def test_an_epoch_that_was_dead_lettered_as_a_whole_ends_the_feed(
    num_prompts: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.feed.dataset_feed.POLL_S", 0.001)
    queue, reasons = MemoryReplayQueue(MemoryStore(), ReplayConfig(max_staleness=10**6)), list[str]()
    dead_lettering = asyncio.create_task(dead_letter(queue))
    try:
        async with asyncio.timeout(60):
            with pytest.raises(
                InvalidInput, match="all 20 prompts of an epoch were dead-lettered .* with prompt_too_long"
            ):
                await feeder_of(queue, num_prompts, reasons, weight=weight).run()
    finally:
        await end_task(dead_lettering)
