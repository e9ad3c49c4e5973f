"""Sends the scores of finished validations to the loggers, beside training.

The feed validates and rollout servers score, so the learner learns of a score from the queue. Evaluations whose id is
`NAME-STEP` count as validations. The last policy is validated after the last step, so the learner waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.errors import PenstockError
from penstock.replay.contract import GroupConsumer
from penstock.store.heartbeats import VALIDATOR, Heartbeats
from penstock_learner.loggers.opening import StepLoggers
from penstock_learner.loggers.verl_names import VALIDATION

logger = logging.getLogger(__name__)
POLL_S, END_S = 5.0, 2.0
LAST_POLL_S = 0.5
MAX_SILENCE_S = 120.0
"""A validator that died is started again within this time. After it, nobody validates any more."""


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
            # A new run is validated before its first step, perhaps before this look. Nobody has logged that.
            self._known = {name for name in history if 0 < self.resume_step >= name_and_step(name)[1]}
        for name in history.keys() - self._known:
            benchmark, step = name_and_step(name)
            named = benchmark if is_named_score(benchmark) else f"{benchmark}/reward/mean"
            scores.setdefault(step, {})[f"{VALIDATION}{named}"] = history[name]
        self._known |= history.keys()
        for step in sorted(scores):
            self.loggers.log_validation(step, scores[step])

    async def wait_for_last(
        self, step: int, heartbeats: Heartbeats, timeout_s: float, stopping: asyncio.Event,
        max_silence_s: float = MAX_SILENCE_S,
    ) -> None:  # fmt: skip
        """Wait for the scores of the last policy. Returns at once if nobody validates, and in any case after
        `timeout_s`, when `stopping` is set, or when the validator has been away for `max_silence_s`."""
        now = time.monotonic()
        deadline, seen_at = now + timeout_s, now - max_silence_s
        while not stopping.is_set():
            try:
                silence_s = (await heartbeats.ages_s()).get(VALIDATOR)
                if any(_is_score_of(name, step) for name in await self.queue.evaluation_history()):
                    return
            except PenstockError as error:
                logger.warning("cannot see whether the last policy is validated: %s; trying again", error)
                silence_s = 0.0
            now = time.monotonic()
            if silence_s is not None:
                seen_at = now - silence_s
            if now >= min(deadline, seen_at + max_silence_s):
                if silence_s is not None:
                    logger.warning(
                        "the last policy was not validated in %.0f s, so its scores are missing in the loggers; see "
                        "the feed's log, or raise dataset.validation.last_timeout_s", timeout_s - (deadline - now),
                    )  # fmt: skip
                return
            await asyncio.sleep(LAST_POLL_S)

    async def end(self) -> None:
        """Look for the last time, before the loggers are closed."""
        try:
            async with asyncio.timeout(END_S):
                await self.look()
        except (PenstockError, TimeoutError) as error:
            logger.warning("the scores of the last validations cannot be read: %s", error)


def name_and_step(evaluation_id: str) -> tuple[str, int]:
    """The name without the prefix of the feed's validations, and the step."""
    benchmark, _, step = evaluation_id.rpartition("-")
    return benchmark.removeprefix("validation-"), int(step)


def is_named_score(name: str) -> bool:
    """Whether this is a score of a data source, and not of a whole evaluation. The feed and the learner name them as
    verl does: openai/gsm8k/reward/mean@8."""
    return any(kind in name for kind in ("/reward/", "/combined_reward/", "/reward_model/"))


def _is_score_of(name: str, step: int) -> bool:
    """Whether the feed has recorded this score after its validation of the step. It does so last."""
    benchmark, of_step = name_and_step(name)
    return of_step == step and "/reward/" in benchmark
