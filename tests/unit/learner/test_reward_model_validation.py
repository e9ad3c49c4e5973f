"""Validations that the learner's reward model scores, on their way from the queue to the loggers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.codec import encode_group
from penstock.config.learner import RewardModelConfig, SamplesConfig
from penstock.config.service import ReplayConfig
from penstock.errors import Unavailable
from penstock.trajectory import Group
from penstock_learner.loggers.samples import TrainedStep
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loggers.validations import ValidationGroups, ValidationLog
from penstock_learner.loop.process import repeated
from penstock_learner.term import Term
from support.groups import groups_of, make_group
from support.learner_ranks import make_step
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import queue_with

pytestmark = pytest.mark.usefixtures("one_rank")
CONFIG = RewardModelConfig(path=Path("rm"), coefficient=0.5)


async def validated(queue: MemoryReplayQueue, evaluation_id: str, groups: Sequence[Group]) -> None:
    """An evaluation with these groups, all of which are kept."""
    await queue.create_evaluation(evaluation_id, [b"q"] * len(groups))
    for lease, group in zip(await queue.lease("s", len(groups)), groups, strict=True):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        await queue.record_evaluation(
            evaluation_id, lease, rewards, 0, 0, group.data_source, kept_group=encode_group(group)
        )


def reading(
    queue: Any, score: Any, reward_model: RewardModelConfig | None, groups_at_once: int, **settings: Any
) -> ValidationGroups:
    no_samples: Any = SimpleNamespace(config=SamplesConfig(validation_samples=0))
    return ValidationGroups(queue, no_samples, groups_at_once, score, reward_model, **settings)


class LengthModel:
    """A reward model whose score is the number of tokens of the response."""

    def __init__(self) -> None:
        self.num_groups: list[int] = []
        self.is_stuck = False

    async def score(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        self.num_groups.append(len(groups))
        if self.is_stuck:
            await asyncio.sleep(60)
        return np.array([len(t.token_ids) for g in groups for t in g.trajectories], dtype=np.float32)


def means(groups: Sequence[Group], combine: str = "add") -> tuple[float, float]:
    """Mean score of LengthModel, and mean combined reward."""
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    score = float(np.mean([len(t.token_ids) for t in samples]))
    reward = float(np.mean([t.reward for t in samples])) if combine == "add" else 0.0
    return score, reward + 0.5 * score


@pytest.mark.parametrize("combine", ["add", "replace"])
async def test_a_validation_is_scored_once_in_parts_and_by_data_source(combine: Any) -> None:
    queue, model, groups = await queue_with(ReplayConfig(), []), LengthModel(), groups_of("chat", "chat", "poems")
    await validated(queue, "validation-math-20", groups)
    scored = reading(queue, model.score, CONFIG.model_copy(update={"combine": combine}), 2)
    await scored.read_new()
    await scored.read_new()
    assert model.num_groups == [2, 1]
    assert (await queue.kept_groups("validation-math-20")).prompt_ids == ()
    history = await queue.evaluation_history()
    for source, own in (("chat", groups[:2]), ("poems", groups[2:])):
        score, both = means(own, combine)
        assert history[f"{source}/reward_model/mean@4-20"] == pytest.approx(score)
        assert history[f"{source}/combined_reward/mean@4-20"] == pytest.approx(both)
        assert history[f"{source}/combined_reward/best@4/mean-20"] > both
    assert (await queue.evaluation_scores())["chat/combined_reward/mean@4"] == history["chat/combined_reward/mean@4-20"]


async def test_text_has_the_rewards_that_training_has_and_other_sources_keep_theirs() -> None:
    queue, groups, written = (
        await queue_with(ReplayConfig(), []),
        groups_of("chat", "rules", "chat"),
        list[TrainedStep](),
    )
    await validated(queue, "validation-math-20", groups)
    await queue.record_scores(20, {"chat/acc/mean@4": 1.0, "chat/reward/mean@4": 1.0})
    samples: Any = SimpleNamespace(config=SamplesConfig(validation_samples=5), record=written.append)
    config = CONFIG.model_copy(update={"data_sources": ("chat",)})
    await ValidationGroups(queue, samples, 1, LengthModel().score, config).read_new()
    [step] = written
    assert (step.step, step.validation, [group.prompt_id for group in step.groups]) == (20, "math", [1, 2])
    assert step.prompts == {1: b"q", 2: b"q"}
    assert float(step.rewards[:4].mean()) == pytest.approx(means(groups[:1])[1])
    assert step.rewards[4:].tolist() == [trajectory.reward for trajectory in groups[1].trajectories]


async def test_the_scores_are_those_of_training_and_reach_the_loggers(tiny_models: dict[str, Path]) -> None:
    """With a real reward model: the same groups as a training batch have the same mean."""
    groups = groups_of("chat", "chat")
    settings = {"path": str(tiny_models["scalar"]), "combine": "add", "coefficient": 0.1}
    step = make_step(tiny_models, reward_model=settings)
    queue, logged = await queue_with(ReplayConfig(), []), list[tuple[int, dict[str, float]]]()
    await validated(queue, "validation-math-0", groups)
    assert step.config.reward_model is not None
    await reading(queue, step.reward_model_scores, step.config.reward_model, 1).read_new()
    loggers: Any = StepLoggers([])
    loggers.log_validation = lambda step, scores: logged.append((step, dict(scores)))
    await ValidationLog(queue, loggers, 0).log_new()
    [(number, scores)] = logged
    assert number == 0
    assert scores.keys() == {
        "val-core/math/reward/mean", "val-core/chat/reward_model/mean@4", "val-core/chat/combined_reward/mean@4",
        "val-core/chat/combined_reward/best@4/mean",
    }  # fmt: skip
    trained = (await step.run(groups, 1, Term())).by_name()["reward_mean"]
    assert scores["val-core/chat/combined_reward/mean@4"] == pytest.approx(trained, abs=1e-5)
    rules = scores["val-core/math/reward/mean"]
    assert scores["val-core/chat/reward_model/mean@4"] == pytest.approx((trained - rules) / 0.1, abs=1e-4)


async def test_what_cannot_be_scored_whole_has_no_score(caplog: pytest.LogCaptureFixture) -> None:
    model = LengthModel()
    small = await queue_with(ReplayConfig(capacity_bytes=2**20), [])
    big = replace(make_group(1), prompt_token_ids=np.random.default_rng(0).integers(2, 2**30, 2**17).astype(np.int32))
    await validated(small, "validation-math-1", [make_group(2), big])
    await reading(small, model.score, CONFIG, 2).read_new()
    assert "1 groups had no room; raise replay.capacity_bytes" in caplog.text

    queue = await queue_with(ReplayConfig(), [])
    await validated(queue, "validation-math-2", [make_group(3, vocab_size=999)])
    await reading(queue, model.score, CONFIG, 2, vocabulary_size=16).read_new()
    assert "is not in the model's vocabulary of 16" in caplog.text
    assert model.num_groups == []

    async def broken(groups: Sequence[Group]) -> NDArray[np.float32]:
        return await model.score(groups) * np.float32(np.nan)

    await validated(queue, "validation-math-3", [make_group(4)])
    await reading(queue, broken, CONFIG, 2).read_new()
    assert "are not finite, so they are not recorded" in caplog.text
    for one in (small, queue):
        assert not any("reward_model" in name for name in await one.evaluation_history())


async def test_the_last_validation_is_scored_before_the_end_but_not_forever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    queue, model, stopping = await queue_with(ReplayConfig(), []), LengthModel(), asyncio.Event()
    scored = reading(queue, model.score, CONFIG, 2)
    watching = asyncio.create_task(repeated(scored.read_new, 5.0, "the samples cannot be read"))
    await asyncio.sleep(0)
    await validated(queue, "validation-math-5", groups_of("chat"))
    async with asyncio.timeout(60):
        await scored.finish(60, stopping)
        assert "chat/combined_reward/mean@4-5" in await queue.evaluation_history()
        model.is_stuck = True
        await validated(queue, "validation-math-6", groups_of("chat"))
        await scored.finish(0.05, stopping)
        assert "raise dataset.validation.last_timeout_s" in caplog.text
        stopping.set()
        await scored.finish(60, stopping)
    assert (await queue.kept_groups("validation-math-6")).prompt_ids, "a successor scores it"
    watching.cancel()


async def test_a_store_that_does_not_answer_ends_neither_training_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await queue_with(ReplayConfig(), [])

    async def refuse() -> dict[str, float]:
        raise Unavailable("Redis does not answer")

    queue.evaluation_history = refuse  # type: ignore[method-assign]
    await reading(queue, LengthModel().score, CONFIG, 2).finish(5, asyncio.Event())
    assert "Redis does not answer" in caplog.text
