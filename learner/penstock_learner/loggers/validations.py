"""Sends the scores of finished validations to the loggers, beside training.

The feed validates and rollout servers score, so the learner learns of a score from the queue. Evaluations whose id is
`NAME-STEP` count as validations.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import PenstockError
from penstock.replay.contract import GroupConsumer
from penstock_learner.loggers.opening import StepLoggers
from penstock_learner.loggers.verl_names import VALIDATION

logger = logging.getLogger(__name__)
POLL_S, END_S = 5.0, 2.0


class ValidationLog:
    """The validations of one term, which starts from `resume_step`. Those of earlier steps were logged before."""

    def __init__(self, queue: GroupConsumer, loggers: StepLoggers, resume_step: int) -> None:
        self.queue = queue
        self.loggers = loggers
        self.resume_step = resume_step
        self._known: set[str] | None = None
        """Evaluations that were logged. None before the first look."""

    async def watch(self) -> None:
        """Runs for ever. A look that fails is made again: training does not depend on it."""
        while True:
            try:
                await self.look()
            except PenstockError as error:
                logger.warning("the scores of validations cannot be read: %s; trying again", error)
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Log the validations that have finished since the last look."""
        scores: dict[int, dict[str, float]] = {}
        history = await self.queue.evaluation_history()
        if self._known is None:
            self._known = {name for name in history if _parts(name)[1] <= self.resume_step}
        for name in history.keys() - self._known:
            benchmark, step = _parts(name)
            scores.setdefault(step, {})[f"{VALIDATION}{benchmark}/reward/mean"] = history[name]
        self._known |= history.keys()
        for step in sorted(scores):
            self.loggers.log_validation(step, scores[step])

    async def end(self) -> None:
        """Look for the last time, before the loggers are closed."""
        try:
            async with asyncio.timeout(END_S):
                await self.look()
        except (PenstockError, TimeoutError) as error:
            logger.warning("the scores of the last validations cannot be read: %s", error)


def _parts(evaluation_id: str) -> tuple[str, int]:
    """The name without the prefix of the feed's validations, and the step."""
    benchmark, _, step = evaluation_id.rpartition("-")
    return benchmark.removeprefix("validation-"), int(step)
