"""Validations, alongside training: their scores go to the loggers, some of their samples are written as text, and the
learner's reward model scores them.

The feed validates and rollout servers score, so the learner learns of a score from the queue. Evaluations whose id is
`NAME-STEP` count as validations. The groups of a finished one are read in parts of a step's size, so that a training
batch waits for one part at most. Their scores by the reward model are recorded in the queue, as the feed
does, and reach the loggers, the console and Prometheus from there:

    SOURCE/reward_model/mean@k        the model's score
    SOURCE/combined_reward/mean@k     the reward as training has it: `learner.reward_model.combine` and `coefficient`
    SOURCE/combined_reward/best@k/mean
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.cancellation import end_task
from penstock.codec import decode_group
from penstock.config.learner import RewardModelConfig
from penstock.errors import PenstockError, PoisonGroup, QueueFull, Unavailable
from penstock.replay.queue import GroupConsumer
from penstock.sample_scores import PromptSamples, scores_by_source
from penstock.store.heartbeats import VALIDATOR, Heartbeats
from penstock.trajectory import Group
from penstock_learner.batches.sequence_batch import check_tokens
from penstock_learner.loggers.samples import SampleLog, TrainedStep
from penstock_learner.loggers.step_loggers import VALIDATION, StepLoggers
from penstock_learner.steps.program import combined

logger = logging.getLogger(__name__)
END_S = 2.0
LAST_POLL_S = 0.5
MAX_SILENCE_S = 120.0
"""A validator that died is started again within this time. After it, nothing validates any more."""


@dataclass(eq=False)
class ValidationLog:
    """The validations of one term, which starts from `start_step`. Those of earlier steps were logged before."""

    queue: GroupConsumer
    loggers: StepLoggers
    start_step: int
    _known: set[str] | None = None
    """Evaluations that were logged. None before the first call of `log_new`."""

    async def log_new(self) -> None:
        scores: dict[int, dict[str, float]] = {}
        history = await self.queue.evaluation_history()
        if self._known is None:
            # A new run is validated before its first step, perhaps before this call. No one has logged that.
            self._known = {name for name in history if 0 < self.start_step >= name_and_step(name)[1]}
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
        """Wait for the scores of the last policy. Returns at once if nothing validates, and in any case after
        `timeout_s`, when `stopping` is set, or when the validator has been away for `max_silence_s`."""
        now = time.monotonic()
        deadline, seen_at = now + timeout_s, now - max_silence_s
        while not stopping.is_set():
            try:
                silence_s = (await heartbeats.ages_s()).get(VALIDATOR)
                scores = [name_and_step(name) for name in await self.queue.evaluation_history()]
                # The feed records these scores last.
                if any(of_step == step and "/reward/" in name for name, of_step in scores):
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
        """Log the last scores, before the loggers are closed."""
        try:
            async with asyncio.timeout(END_S):
                await self.log_new()
        except (PenstockError, TimeoutError) as error:
            logger.warning("the scores of the last validations cannot be read: %s", error)


def name_and_step(evaluation_id: str) -> tuple[str, int]:
    """The name without the prefix of the feed's validations, and the step."""
    benchmark, _, step = evaluation_id.rpartition("-")
    return benchmark.removeprefix("validation-"), int(step)


def is_named_score(name: str) -> bool:
    """Whether this is a score of a data source, and not of a whole evaluation. The feed and the learner name them as
    verl does: openai/gsm8k/reward/mean@8. No name of an evaluation has a slash."""
    return "/" in name


def rewards_of(group: Group) -> NDArray[np.float32]:
    return np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float32)


@dataclass(eq=False)
class ValidationGroups:
    """Reads the groups of each finished validation once, at most `groups_at_once` in one call: writes some as text, and
    has a `reward_model` score them. Tokens beyond `vocabulary_size` are refused; without it, tokens are not checked."""

    queue: GroupConsumer
    samples: SampleLog
    groups_at_once: int
    score: Callable[[Sequence[Group]], Awaitable[NDArray[np.float32]]] | None = None
    """The reward model's scores of all samples of the groups, in order. Given with `reward_model`."""
    reward_model: RewardModelConfig | None = None
    vocabulary_size: int | None = None
    _seen: set[str] = field(default_factory=set)
    """Evaluations that were read, or have nothing to read."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read_new(self) -> None:
        """Read the validations that were not read yet. A death of the reward model is handled as in training."""
        async with self._reading:
            finished = [name for name in await self.queue.evaluation_history() if not is_named_score(name)]
            for evaluation_id in sorted(finished, key=lambda name: name_and_step(name)[1]):
                if evaluation_id not in self._seen:
                    await self._read(evaluation_id)
                    self._seen.add(evaluation_id)

    async def finish(self, timeout_s: float, stopping: asyncio.Event) -> None:
        """Read the last validation before the learner ends, within `timeout_s` and until `stopping` is set."""
        reading, stopped = asyncio.create_task(self.read_new()), asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({reading, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            elif not stopped.done():
                logger.warning(
                    "the samples of the last validation were not read in time, so their text and the reward model's "
                    "scores are missing; raise dataset.validation.last_timeout_s"
                )
        except (QueueFull, Unavailable) as error:
            logger.warning("the samples of the last validation cannot be read: %s", error)
        finally:
            await end_task(reading)
            await end_task(stopped)

    async def _read(self, evaluation_id: str) -> None:
        """Score the kept groups, forget them, and write some as text. Without all groups nothing is scored."""
        kept = await self.queue.kept_groups(evaluation_id)
        if kept.num_omitted:
            logger.warning(
                "%s is neither written whole nor scored by the reward model: %d groups had no room; raise "
                "replay.capacity_bytes, of which a quarter is for the groups of a validation", evaluation_id,
                kept.num_omitted,
            )  # fmt: skip
        elif not kept.prompt_ids:
            return
        rewarded, scored = list[PromptSamples](), list[PromptSamples]()
        shown, rewards = list[Group](), list[float]()
        try:
            for first in range(0, len(kept.prompt_ids), self.groups_at_once):
                groups = await self._groups(evaluation_id, kept.prompt_ids[first : first + self.groups_at_once])
                found = {} if kept.num_omitted else await self._scores(groups)
                for group in groups:
                    both = rewards_of(group)
                    if group.prompt_id in found:
                        own, both = found[group.prompt_id]
                        rewarded.append(PromptSamples(group.data_source, tuple(both.tolist())))
                        scored.append(PromptSamples(group.data_source, tuple(own.tolist())))
                    if len(rewards) < self.samples.config.validation_samples:
                        shown.append(group)
                        rewards += both.tolist()
        except PoisonGroup as error:
            logger.error("%s is neither written nor scored by the reward model: %s", evaluation_id, error)
            await self.queue.forget_kept(evaluation_id)
            return
        if scored:
            await self._record(evaluation_id, rewarded, scored)
        ids = [group.prompt_id for group in shown]
        prompts = dict(zip(ids, await self.queue.fetch_kept(evaluation_id, ids, "prompt:"), strict=False))
        await self.queue.forget_kept(evaluation_id)
        if shown:
            name, step = name_and_step(evaluation_id)
            version, of_samples = max(group.max_version for group in shown), np.array(rewards, dtype=np.float32)
            written = TrainedStep(step, version, shown, prompts, of_samples, validation=name)
            await asyncio.to_thread(self.samples.record, written)

    async def _groups(self, evaluation_id: str, prompt_ids: Sequence[int]) -> list[Group]:
        payloads = await self.queue.fetch_kept(evaluation_id, prompt_ids)
        if len(payloads) < len(prompt_ids):
            raise PoisonGroup("identity", "its groups have expired")
        return await asyncio.to_thread(self._decode, payloads)

    async def _scores(self, groups: Sequence[Group]) -> dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Scores and combined rewards of the groups that the reward model scores, by prompt."""
        model = self.reward_model
        judged = [group for group in groups if model is not None and model.scores_source(group.data_source)]
        if model is None or self.score is None or not judged:
            return {}
        ends = np.cumsum([len(group.trajectories) for group in judged])
        scores = zip(judged, np.split(await self.score(judged), ends[:-1]), strict=True)
        return {group.prompt_id: (own, combined(rewards_of(group), own, model)) for group, own in scores}

    def _decode(self, payloads: Sequence[bytes]) -> list[Group]:
        groups = [decode_group(payload) for payload in payloads]
        if self.vocabulary_size is not None:
            for group in groups:
                check_tokens(group, self.vocabulary_size)
        return groups

    async def _record(
        self, evaluation_id: str, rewarded: Sequence[PromptSamples], scored: Sequence[PromptSamples]
    ) -> None:
        if not all(math.isfinite(score) for prompt in scored for score in prompt.rewards):
            logger.error(
                "the reward model's scores of %s are not finite, so they are not recorded; check "
                "learner.reward_model.path", evaluation_id,
            )  # fmt: skip
            return
        name, step = name_and_step(evaluation_id)
        scores = {
            f"{source or name}/combined_reward/{kind}": value
            for source, kinds in scores_by_source(rewarded).items()
            for kind, value in kinds.items()
        }
        for source, kinds in scores_by_source(scored).items():
            scores |= {f"{source or name}/reward_model/{k}": v for k, v in kinds.items() if k.startswith("mean@")}
        await self.queue.record_scores(step, scores)
        shown = "  ".join(f"{score} {value:.3f}" for score, value in scores.items())
        logger.info("validation at step %d, by the reward model: %s", step, shown)
