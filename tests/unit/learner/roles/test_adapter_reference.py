"""With an adapter the reference is the policy without it: no second model, and the same log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.algorithms import KLConfig
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.model.loading import is_adapter
from penstock_learner.optim.optimizer import make_optimizer
from penstock_learner.roles.frozen import ReferenceWorker
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.term import KLController, Term
from support.groups import groups_of, make_group
from support.learner_ranks import make_rank, make_step, with_model

LORA = {"rank": 4, "alpha": 8}
pytestmark = pytest.mark.usefixtures("one_rank")


def change_adapter(policy: PolicyWorker) -> None:
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def test_log_probs_without_the_adapter_are_those_of_a_separate_reference(tiny_models: dict[str, Path]) -> None:
    config = validate(with_model({"learner": {"lora": LORA}}, tiny_models["policy"]), "test")
    policy, reference = make_rank(PolicyWorker, config), make_rank(ReferenceWorker, config)
    change_adapter(policy)
    batch = batch_of([make_group(1), make_group(2)])
    part = RankShard([batch], [list(range(batch.num_sequences))])
    before = policy.log_probs(part)
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    np.testing.assert_array_equal(policy.reference_log_probs(part), reference.log_probs(part))
    assert np.abs(before - reference.log_probs(part)).max() > 0.01
    np.testing.assert_array_equal(policy.log_probs(part), before)
    assert trained == {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}


def test_an_adapter_that_stays_on_is_an_error_and_not_a_kl_of_zero(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate(with_model({"learner": {"lora": LORA}}, tiny_models["policy"]), "test")
    policy = make_rank(PolicyWorker, config)
    monkeypatch.setattr("peft.tuners.tuners_utils.BaseTunerLayer.disable_adapters", False)
    batch = batch_of([make_group(1)])
    with pytest.raises(ConfigError, match=r"peft [\d.]+ does not let the learner switch an adapter off"):
        policy.reference_log_probs(RankShard([batch], [list(range(batch.num_sequences))]))


async def test_nothing_but_the_adapter_is_trained(tiny_models: dict[str, Path]) -> None:
    """Servers get the adapter alone: an embedding, a last norm or a head that is trained too never reaches them."""
    step = make_step(tiny_models, lora=LORA, lr=1e-2)
    policy: Any = step.roles["policy"]
    weights = dict(policy.rank.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for number in (1, 2):
        await step.run(groups_of("a", "b"), number, Term())
    moved = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in weights if is_adapter(name)}


async def test_a_checkpoint_moves_nothing_but_the_adapter(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """One that trained more than the adapter continues with the frozen weights of the folder, which servers have."""
    first, second = (make_step(tiny_models, lora=LORA, lr=1e-2) for _ in range(2))
    roles: Any = [step.roles["policy"] for step in (first, second)]
    saving, loading = (role.rank for role in roles)
    saving.model.requires_grad_(True)
    saving.optimizer = make_optimizer(saving.model, saving.config.learner, 1e-2)
    saving.policy_update = replace(saving.policy_update, optimizer=saving.optimizer)
    await first.run(groups_of("a", "b"), 1, Term())
    saving.stage(tmp_path / "policy")
    saving.finish_saving()
    before = {name: weight.detach().clone() for name, weight in loading.model.named_parameters()}
    loading.load_checkpoint(tmp_path / "policy")
    saved = dict(saving.model.named_parameters())
    for name, weight in loading.model.named_parameters():
        assert torch.equal(weight, (saved if is_adapter(name) else before)[name]), name
    assert not torch.equal(saved["lm.model.norm.weight"], before["lm.model.norm.weight"])
    await second.run(groups_of("a", "b"), 2, Term())


async def test_a_step_is_the_same_with_and_without_a_reference_of_its_own(tiny_models: dict[str, Path]) -> None:
    async def metrics(**learner: Any) -> dict[str, float]:
        torch.manual_seed(7)
        step = make_step(tiny_models, lora=LORA, algorithm={"kl": {"placement": "loss", "coefficient": 0.1}}, **learner)
        assert ("reference" in step.roles) == bool(learner)
        change_adapter(step.roles["policy"].rank)  # type: ignore[attr-defined]
        term = Term(kl=KLController(KLConfig(), 0.1))
        return (await step.run([make_group(1), make_group(2)], 1, term)).by_name()

    alone, beside = await metrics(), await metrics(reference={"path": str(tiny_models["policy"])})
    assert alone["kl_reference"] == pytest.approx(beside["kl_reference"], abs=1e-6) and alone["kl_reference"] > 0.01
    assert alone["grad_norm"] == pytest.approx(beside["grad_norm"], rel=1e-5)
