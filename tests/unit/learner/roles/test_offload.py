"""Roles whose state is in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock_learner.roles import frozen
from penstock_learner.term import Term
from support.groups import groups_of
from support.learner_ranks import make_step

pytestmark = pytest.mark.usefixtures("one_rank")


def settings(tiny_models: dict[str, Path], *, offload: bool) -> dict[str, Any]:
    return {
        "lr": 1e-2,
        "algorithm": {"kl": {"placement": "loss", "penalty": "k3"}},
        "reference": {"offload": offload},
        "reward_model": {"path": str(tiny_models["scalar"]), "offload": offload},
    }


async def test_offloaded_models_give_the_same_numbers_with_one_rank(tiny_models: dict[str, Path]) -> None:
    found = []
    for offload in (False, True):
        step = make_step(tiny_models, **settings(tiny_models, offload=offload))
        for name in ("reference", "reward_model"):
            role: Any = step.roles[name]
            assert {isinstance(weight, DTensor) for weight in role.rank.model.parameters()} == {offload}
        results = [await step.run(groups_of("a", "b"), number, Term()) for number in (1, 2)]
        found.append(
            [(result.rewards.tolist(), result.by_name()["kl_reference"], result.update.loss) for result in results]
        )
    assert found[0] == found[1] and found[0][1][1] != 0


async def test_an_offloaded_policy_takes_and_pushes_the_same_steps(tiny_models: dict[str, Path]) -> None:
    found = []
    for offload in ("none", "weights", "all"):
        step = make_step(tiny_models, lr=1e-2, offload=offload)
        results = [await step.run(groups_of("a", "b"), number, Term()) for number in (1, 2)]
        policy: Any = step.roles["policy"]
        pushed = {name: weight.clone() for name, weight in policy.rank.pushed.gathered()}
        found.append(([(each.update.loss, each.update.grad_norm) for each in results], pushed))
    (losses, weights), *others = found
    assert losses[0] != losses[1]
    for other_losses, other_weights in others:
        assert other_losses == losses and weights.keys() == other_weights.keys()
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def test_quantized_weights_are_not_offloaded(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "is_quantized", lambda _: True)
    make_step(tiny_models, **settings(tiny_models, offload=False))
    with pytest.raises(ConfigError, match=r"quantized weights cannot be offloaded; set offload to false"):
        make_step(tiny_models, **settings(tiny_models, offload=True))


def test_trained_roles_have_one_offload() -> None:
    roles = {"second": {"worker": "critic", "offload": True}}
    with pytest.raises(ValueError, match=r"set learner\.offload, which is for all that are"):
        LearnerConfig.model_validate({"step": "x.py:f", "critic": {}, "roles": roles})
