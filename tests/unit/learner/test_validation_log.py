"""Scores of validations on their way from the queue to the loggers."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config.service import ReplayConfig
from penstock.errors import Unavailable
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock_learner.loggers.opening import StepLoggers
from penstock_learner.loggers.validations import ValidationLog
from replay_backends import queue_with


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
    await log.look()
    await validated(queue, "validation-math-0", 0.25)
    await validated(queue, "validation-code-0", 0.5)
    await validated(queue, "heldout", 1.0)
    await log.look()
    await log.look()
    await validated(queue, "validation-math-20", 0.75)
    await log.end()
    first = {"val-core/math/reward/mean": 0.25, "val-core/code/reward/mean": 0.5}
    assert loggers.scores == [(0, first), (20, {"val-core/math/reward/mean": 0.75})]


async def test_a_restarted_learner_logs_only_what_comes_after_its_checkpoint() -> None:
    queue, loggers = await queue_with(ReplayConfig(), []), CollectingLoggers()
    for step in (0, 10, 20):
        await validated(queue, f"validation-math-{step}", step / 100)
    log = ValidationLog(queue, loggers, 10)
    await log.look()
    assert loggers.scores == [(20, {"val-core/math/reward/mean": 0.2})]


async def test_a_store_that_does_not_answer_does_not_stop_the_end() -> None:
    queue = await queue_with(ReplayConfig(), [])

    async def refuse() -> dict[str, float]:
        raise Unavailable("Redis does not answer")

    queue.evaluation_history = refuse  # type: ignore[method-assign]
    await ValidationLog(queue, CollectingLoggers(), 0).end()
