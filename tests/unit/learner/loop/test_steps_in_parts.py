"""Training steps over real workers in this process: batches that are trained in parts, and the proximal policy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.config.learner import LearnerConfig
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.steps.program import denominators_of, with_advantages
from penstock_learner.steps.roles import AheadBatch, StepContext
from penstock_learner.term import Term
from support.groups import groups_of
from support.learner_ranks import make_step

pytestmark = pytest.mark.usefixtures("one_rank")


def train_by_parts(models: dict[str, Path], batch: SequenceBatch, parts: list[list[int]], **learner: Any) -> Any:
    """The policy after one update on each of the parts, made without `TrainingStep`."""
    policy: Any = make_step(models, **learner).roles["policy"]
    for part in parts:
        chosen = batch.select(part)
        denominators = denominators_of(chosen, policy.rank.config.learner.algorithm.loss)
        (shard,) = partition(chosen, 1, 10**6)
        policy.rank.update(shard, denominators, 1, 0, 0.0)
    return policy.rank


async def test_a_batch_is_trained_in_parts_against_the_policy_of_its_start(tiny_models: dict[str, Path]) -> None:
    """Two passes over three parts. The first update trains the policy that gave the log-probs. After it the ratios
    differ from 1 and clipping has an effect."""
    learner: dict[str, Any] = {"lr": 1e-2, "algorithm": {"loss": {"clip_low": 0.01, "clip_high": 0.01}}}
    groups = groups_of("a", "b", "c")
    step = make_step(tiny_models, **learner, minibatches_per_step=3, epochs_per_step=2)
    result = await step.run(groups, 1, Term())
    metrics = result.by_name()
    assert result.recomputed is not None
    batch = with_advantages(replace(batch_of(groups), old_log_probs=result.recomputed), step.config.algorithm, 0.0)
    expected = train_by_parts(tiny_models, batch, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2, **learner)
    trained: Any = step.roles["policy"]
    for name, weight in expected.model.named_parameters():
        assert torch.equal(weight, trained.rank.model.get_parameter(name)), name
    assert metrics["clip_ratio_low"] + metrics["clip_ratio_high"] > 0.1 and metrics["approx_kl"] != 0
    assert metrics["num_sequences"] == 12
    whole = (await make_step(tiny_models, **learner).run(groups, 1, Term())).by_name()
    assert whole["clip_ratio_low"] == whole["clip_ratio_high"] == 0
    assert metrics["logprob_mismatch"] != whole["logprob_mismatch"], "of the first part, under the weights of the start"


async def test_the_critic_learns_in_parts_alongside_the_policy(tiny_models: dict[str, Path]) -> None:
    """Policy and critic make four updates each, in step with each other. Values are clipped around the first ones."""
    learner: dict[str, Any] = {
        "algorithm": {"advantage": {"name": "gae"}, "value_loss": {"clip": 1e-4}}, "critic": {"lr": 1e-2},
        "minibatches_per_step": 4,
    }  # fmt: skip
    groups = groups_of("a", "b")
    metrics = (await make_step(tiny_models, {"update": asyncio.Barrier(2)}, **learner).run(groups, 1, Term())).by_name()
    assert metrics["critic_clip_ratio"] > 0
    whole = (await make_step(tiny_models, **learner | {"minibatches_per_step": 1}).run(groups, 1, Term())).by_name()
    assert whole["critic_clip_ratio"] == 0


async def test_minibatches_are_neighbours_in_the_order_of_the_batch(tiny_models: dict[str, Path]) -> None:
    """Three parts, two epochs: the parts of the batch in order, and then the same parts again."""
    step = make_step(
        tiny_models, minibatches_per_step=3, epochs_per_step=2, algorithm={"correction": {"mode": "bypass"}}
    )
    policy: Any = step.roles["policy"]
    trained: list[list[int]] = []
    update = policy.rank.update

    def recorded(part: Any, *arguments: Any) -> Any:
        (micro,) = part.micro_batches
        trained.append(micro.group_ids.tolist())
        return update(part, *arguments)

    policy.rank.update = recorded
    groups = groups_of("a", "b", "c")
    await step.run(groups, 1, Term())
    assert trained == [[group.prompt_id] * len(group.trajectories) for group in groups] * 2


def test_shuffled_minibatches_have_each_sample_once_per_epoch_and_follow_from_the_seed() -> None:
    batch = batch_of(groups_of("a", "b", "c"))
    samples = batch.with_sequence_fields(number=np.arange(batch.num_sequences))

    def parts(step: int = 1, seed: int = 42) -> list[list[int]]:
        config = LearnerConfig(minibatches_per_step=3, epochs_per_step=2, shuffle_minibatches=True, shuffle_seed=seed)
        context: Any = StepContext(config, [], step, 0, 0.0, AheadBatch(asyncio.Future()))
        return [part["number"].tolist() for part in context.minibatches(samples)]

    async def all_parts() -> None:
        first = parts()
        assert len(first) == 6 and first == parts()
        for epoch in (first[:3], first[3:]):
            assert sorted(sum(epoch, [])) == list(range(batch.num_sequences))
        assert first[:3] != first[3:] and first != parts(step=2) and first != parts(seed=1)
        assert sum(first[:3], []) != list(range(batch.num_sequences))

    asyncio.run(all_parts())


async def test_a_single_update_computes_the_proximal_policy_itself(tiny_models: dict[str, Path]) -> None:
    """Without a pass of its own, the weights and the numbers are those of a step that has one."""
    learner: dict[str, Any] = {"lr": 1e-2, "algorithm": {"correction": {"cap": 0.3}}}
    groups = groups_of("a", "b")
    step = make_step(tiny_models, **learner)
    policy: Any = step.roles["policy"]
    (whole,) = partition(batch_of(groups), 1, 10**6)
    before = policy.rank.log_probs(whole)
    policy.rank.log_probs = None  # a call would fail
    result = await step.run(groups, 1, Term())
    metrics = result.by_name()
    assert result.recomputed is not None
    np.testing.assert_allclose(result.recomputed, before, atol=1e-6)
    given = with_advantages(replace(batch_of(groups), old_log_probs=before), step.config.algorithm, 0.0)
    expected = train_by_parts(tiny_models, given, [list(range(8))], **learner)
    for name, weight in expected.model.named_parameters():
        torch.testing.assert_close(policy.rank.model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)
    assert metrics["approx_kl"] == 0 and metrics["importance_weight_max"] == pytest.approx(0.3)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["neighbours", "shuffled"])
async def test_the_first_of_several_updates_computes_the_proximal_policy_itself(
    is_shuffled: bool, tiny_models: dict[str, Path]
) -> None:
    """The pass before the updates leaves its sequences out. Weights and numbers are those of a pass over all."""
    learner: dict[str, Any] = {"lr": 1e-2, "algorithm": {"correction": {"cap": 0.3}}}
    groups = groups_of("a", "b", "c")
    step = make_step(tiny_models, **learner, minibatches_per_step=3, shuffle_minibatches=is_shuffled)
    policy: Any = step.roles["policy"]
    (whole,) = partition(batch_of(groups), 1, 10**6)
    before, log_probs, passed = policy.rank.log_probs(whole), policy.rank.log_probs, []

    def recorded(part: Any) -> Any:
        passed.append(sum(micro.num_sequences for micro in part.micro_batches))
        return log_probs(part)

    policy.rank.log_probs = recorded
    result = await step.run(groups, 1, Term())
    assert passed == [8], "of twelve sequences, four are those of the first update"
    assert result.recomputed is not None
    np.testing.assert_allclose(result.recomputed, before, atol=1e-6)
    given = with_advantages(replace(batch_of(groups), old_log_probs=before), step.config.algorithm, 0.0)
    context: Any = StepContext(step.config, [], 1, 0, 0.0, cast(Any, None))
    parts = context.minibatches(given.with_sequence_fields(number=np.arange(12)))
    expected = train_by_parts(tiny_models, given, [part["number"].tolist() for part in parts], **learner)
    for name, weight in expected.model.named_parameters():
        torch.testing.assert_close(policy.rank.model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "recomputes"),
    [
        ({}, False),
        ({"minibatches_per_step": 2}, True),
        ({"epochs_per_step": 2}, True),
        ({"algorithm": {"kl": {"placement": "reward"}}}, True),
        ({"minibatches_per_step": 2, "algorithm": {"correction": {"mode": "bypass"}}}, False),
        ({"minibatches_per_step": 2, "algorithm": {"correction": {"proximal": "interpolated"}}}, False),
    ],
)
def test_the_proximal_policy_has_a_pass_of_its_own_where_the_weights_change_in_between(
    changed: dict[str, Any], recomputes: bool
) -> None:
    context: Any = StepContext(LearnerConfig.model_validate(changed), [], 1, 0, 0.0, cast(Any, None))
    assert context.recomputes_log_probs == recomputes
