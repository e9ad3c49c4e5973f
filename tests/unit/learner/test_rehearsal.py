"""Rehearsing a step before there is something to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_learner.batches.partition import PrefixTree
from penstock_learner.steps.program import EQUAL, LONG, MIXED, TrainingStep, rehearsal_batch
from penstock_learner.term import Term
from support.groups import make_group
from support.learner_ranks import make_step

pytestmark = pytest.mark.usefixtures("one_rank")
PPO: dict[str, Any] = {"algorithm": {"advantage": {"name": "gae"}}, "critic": {}}


def times(number: int) -> Callable[[], bool]:
    """Says yes so many times."""
    left = iter([True] * number)
    return lambda: next(left, False)


def state_of(step: TrainingStep) -> dict[str, Any]:
    """Weights, and what the optimizers hold that is not 0, of every trained role."""
    found: dict[str, Any] = {}
    for name in step.access.trained:
        rank: Any = step.roles[name]
        rank = rank.rank
        found |= {f"{name}.{key}": value.clone() for key, value in rank.model.state_dict().items()}
        for index, state in enumerate(rank.optimizer.state.values()):
            found |= {f"{name}.{index}.{key}": value.clone() for key, value in state.items() if value.any()}
    return found


@pytest.mark.parametrize("learner", [{}, PPO], ids=["grpo", "ppo"])
async def test_a_rehearsal_changes_nothing(tiny_models: dict[str, Path], learner: dict[str, Any]) -> None:
    step = make_step(tiny_models, **learner)
    before, random = state_of(step), torch.get_rng_state()
    assert await step.rehearse(2, 4096, 16, lambda: True) == 4
    after = state_of(step)
    ranks: list[Any] = [step.roles[name] for name in step.access.trained]
    assert all(parameter.grad is None for role in ranks for parameter in role.rank.model.parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(random, torch.get_rng_state())


async def test_a_step_after_a_rehearsal_is_the_same_step(tiny_models: dict[str, Path]) -> None:
    groups = [make_group(number) for number in (1, 2)]
    plain, rehearsed = make_step(tiny_models), make_step(tiny_models)
    await rehearsed.rehearse(2, 4096, 16, lambda: True)
    first, second = [(await step.run(groups, 1, Term())).by_name() for step in (plain, rehearsed)]
    for name in ("loss", "grad_norm", "entropy"):
        assert first[name] == second[name], name
    assert all(torch.equal(value, state_of(rehearsed)[name]) for name, value in state_of(plain).items())


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_it_ends_when_there_is_something_to_train_on(tiny_models: dict[str, Path], number: int) -> None:
    assert await make_step(tiny_models).rehearse(2, 4096, 16, times(number)) == number


async def test_sequences_that_no_engine_makes_are_not_rehearsed(tiny_models: dict[str, Path]) -> None:
    assert await make_step(tiny_models).rehearse(2, 81, 16, lambda: True) == 2, (
        "only those of equal length are so short"
    )
    assert await make_step(tiny_models).rehearse(2, 64, 16, lambda: True) == 0


@pytest.mark.parametrize("form", [MIXED, LONG, EQUAL])
def test_both_batches_of_a_form_differ_in_every_size(form: str) -> None:
    first, second = (rehearsal_batch(form, number, 4, 8, 1000) for number in (0, 1))
    for batch in (first, second):
        assert batch.token_ids.max() < 1000 and len(batch.token_ids) == batch.lengths.sum()
        assert (len(set(batch.lengths.tolist())) == 1) == (form == EQUAL)
    assert first.num_sequences != second.num_sequences
    assert first.lengths.max() != second.lengths.max()
    assert len(first.token_ids) != len(second.token_ids)
    assert len(first.loss_mask) != len(second.loss_mask)


@pytest.mark.parametrize(("form", "shares"), [(MIXED, True), (LONG, True), (EQUAL, False)])
def test_samples_of_a_group_share_their_prompt(form: str, shares: bool) -> None:
    batch = rehearsal_batch(form, 0, 2, 8, 1000)
    tree = PrefixTree.of(batch)
    assert (tree.saved_share > 0.05) == shares
    assert np.all(np.bincount(batch.group_ids) == 8)
