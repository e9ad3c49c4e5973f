"""Rewards of turns and of tokens in a training step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.config.algorithms import AdvantageConfig, AlgorithmConfig
from penstock.trajectory import Group, TokenReward, VersionSegment
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.steps.program import with_advantages
from support.groups import make_group
from support.learner_ranks import make_step

pytestmark = pytest.mark.usefixtures("one_rank")


def two_turns() -> Group:
    """Two samples with two turns of two tokens each and one token of a tool in between. The first turn of the first
    sample has a reward of its own."""
    group = make_group(1, num_samples=2)
    (first, second) = (
        replace(
            sample, token_ids=np.arange(5, dtype=np.int32), loss_mask=np.array([1, 1, 0, 1, 1], np.uint8),
            log_probs=np.zeros(5, np.float32), segments=(VersionSegment(0, 5, 0),), reward=reward,
        )
        for sample, reward in zip(group.trajectories, (1.5, 1.0), strict=True)
    )  # fmt: skip
    return replace(group, trajectories=(replace(first, token_rewards=(TokenReward(1, 0.5),)), second))


def test_the_reward_of_a_turn_is_credited_to_its_turn() -> None:
    batch = batch_of([two_turns()])
    batch = replace(batch, values=np.zeros(10, np.float32))
    gae = with_advantages(batch, AlgorithmConfig(advantage=AdvantageConfig(name="gae")), 0.0)
    assert gae.returns is not None
    assert gae.returns.tolist() == [1.5, 1.5, 0, 1, 1, 1, 1, 0, 1, 1], "the second turn has no part in the first's"
    discounted = AlgorithmConfig(advantage=AdvantageConfig(name="reinforce_plus_plus", gamma=0.5))
    returns = with_advantages(batch, discounted, 0.0).returns
    assert returns is not None and returns[:5].tolist() == [0.375, 0.75, 0, 0.5, 1]
    grpo = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    summed = with_advantages(replace(batch, token_rewards=None), grpo, 0.0).advantages
    np.testing.assert_allclose(with_advantages(batch, grpo, 0.0).advantages, summed, atol=1e-6)


def test_rewards_of_tokens_that_are_not_trained_go_to_the_last_token() -> None:
    group = two_turns()
    moved = replace(group.trajectories[0], token_rewards=(TokenReward(2, 0.5),))
    batch = batch_of([replace(group, trajectories=(moved, group.trajectories[1]))])
    batch = replace(batch, values=np.zeros(10, np.float32))
    returns = with_advantages(batch, AlgorithmConfig(advantage=AdvantageConfig(name="gae")), 0.0).returns
    assert returns is not None and returns[:5].tolist() == [1.5, 1.5, 0, 1.5, 1.5]


async def test_a_reward_model_that_replaces_rewards_replaces_those_of_turns(tiny_models: dict[str, Path]) -> None:
    for combine, kept in (("replace", 0.0), ("add", 0.5)):
        step = make_step(tiny_models, reward_model={"path": str(tiny_models["scalar"]), "combine": combine})
        batch = await step.ahead([two_turns()])
        assert batch.token_rewards is not None and batch.token_rewards.sum() == kept
