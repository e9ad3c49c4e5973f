"""Scores of validations on their way from the queue to the loggers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.config.service import ReplayConfig
from penstock.errors import Unavailable
from penstock.store.heartbeats import VALIDATOR
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loggers.validations import ValidationLog
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import queue_with


class CollectingLoggers(StepLoggers):
    def __init__(self) -> None:
        super().__init__([])
        self.scores: list[tuple[int, dict[str, float]]] = []

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        self.scores.append((step, dict(scores)))


async def validated(queue: MemoryReplayQueue, evaluation_id: str, reward: float) -> None:
    await queue.create_evaluation(evaluation_id, [b"q"])
    [lease] = await queue.lease("s", 1)
    await queue.record_evaluation(evaluation_id, lease, [reward], 0, 0)


async def test_a_validation_is_logged_once_at_its_step() -> None:
    queue, loggers = await queue_with(ReplayConfig(), []), CollectingLoggers()
    log = ValidationLog(queue, loggers, 0)
    await log.log_new()
    await validated(queue, "validation-math-0", 0.25)
    await validated(queue, "validation-code-0", 0.5)
    await validated(queue, "heldout", 1.0)
    await queue.record_scores(0, {"openai/gsm8k/reward/maj@8/mean": 0.125, "openai/gsm8k/acc/mean@8": 0.5})
    await log.log_new()
    await log.log_new()
    await validated(queue, "validation-math-20", 0.75)
    await log.end()
    first = {
        "val-core/math/reward/mean": 0.25, "val-core/code/reward/mean": 0.5,
        "val-core/openai/gsm8k/reward/maj@8/mean": 0.125, "val-core/openai/gsm8k/acc/mean@8": 0.5,
    }  # fmt: skip
    assert loggers.scores == [(0, first), (20, {"val-core/math/reward/mean": 0.75})]


async def test_a_restarted_learner_logs_only_what_comes_after_its_checkpoint() -> None:
    queue, loggers = await queue_with(ReplayConfig(), []), CollectingLoggers()
    for step in (0, 10, 20):
        await validated(queue, f"validation-math-{step}", step / 100)
    log = ValidationLog(queue, loggers, 10)
    await log.log_new()
    assert loggers.scores == [(20, {"val-core/math/reward/mean": 0.2})]


async def test_a_new_run_logs_a_validation_that_was_ready_before_its_learner() -> None:
    queue, loggers = await queue_with(ReplayConfig(), []), CollectingLoggers()
    await validated(queue, "validation-math-0", 0.25)
    await ValidationLog(queue, loggers, 0).log_new()
    assert loggers.scores == [(0, {"val-core/math/reward/mean": 0.25})]


async def test_a_store_that_does_not_answer_does_not_stop_the_end() -> None:
    queue = await queue_with(ReplayConfig(), [])

    async def refuse() -> dict[str, float]:
        raise Unavailable("Redis does not answer")

    queue.evaluation_history = refuse  # type: ignore[method-assign]
    await ValidationLog(queue, CollectingLoggers(), 0).end()


class Validating:
    """The heartbeats of a validator: `ages` are what each look finds, and the last one stays."""

    def __init__(self, *ages: dict[str, float]) -> None:
        self.ages = list(ages)
        self.num_looks = 0

    async def ages_s(self) -> dict[str, float]:
        self.num_looks += 1
        return self.ages[min(self.num_looks, len(self.ages)) - 1]


async def wait(queue: MemoryReplayQueue, heartbeats: Any, **arguments: Any) -> None:
    settings: dict[str, Any] = {"timeout_s": 60.0, "stopping": asyncio.Event(), "max_silence_s": 30.0} | arguments
    async with asyncio.timeout(60):
        await ValidationLog(queue, CollectingLoggers(), 0).wait_for_last(5, heartbeats, **settings)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_learner.loggers.validations.LAST_POLL_S", 0.01)


async def test_the_learner_waits_for_the_scores_of_the_last_policy_even_if_the_validator_is_started_again() -> None:
    queue, heartbeats = await queue_with(ReplayConfig(), []), Validating({VALIDATOR: 0.5}, {}, {VALIDATOR: 0.1})
    await queue.record_scores(4, {"math/reward/mean@1": 0.1})
    waiting = asyncio.create_task(wait(queue, heartbeats))
    while heartbeats.num_looks < 5:
        await asyncio.sleep(0.01)
    await validated(queue, "validation-math-5", 0.5)
    looks = heartbeats.num_looks
    while heartbeats.num_looks < looks + 3:
        await asyncio.sleep(0.01)
    assert not waiting.done(), "the scores of the data sources are recorded last"
    await queue.record_scores(5, {"math/reward/mean@1": 0.5})
    await waiting


async def test_no_one_validates_so_the_learner_does_not_wait() -> None:
    queue, heartbeats = await queue_with(ReplayConfig(), []), Validating({"learner": 0.1})
    await wait(queue, heartbeats)
    assert heartbeats.num_looks == 1


async def test_the_wait_for_the_last_validation_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    queue = await queue_with(ReplayConfig(), [])
    await wait(queue, Validating({VALIDATOR: 0.1}), timeout_s=0.05)
    assert "raise dataset.validation.last_timeout_s" in caplog.text
    await wait(queue, Validating({VALIDATOR: 31.0}))  # it has died and is not started again
    stopping = asyncio.Event()
    stopping.set()
    await wait(queue, Validating({VALIDATOR: 0.1}), stopping=stopping)
