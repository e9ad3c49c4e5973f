"""Shared prefixes give the same log-probs, gradients and use of experts, on every architecture of the packed path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.learner import LearnerConfig, LoraConfig
from penstock.config.loading import validate
from penstock_learner.batches.partition import PrefixTree
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.architectures import depends_on_length, is_recurrent, path_of, prefix_sharing_roles
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.routers import watch_routers
from support.groups import forked_batch, short_batch
from support.tiny_architectures import ARCHITECTURES, FAST, tiny_config, tiny_model
from support.tiny_models import load_scalar_model

CPU = torch.device("cpu")


def _cases() -> list[Any]:
    """Architectures on the packed path whose tokens do not depend on the length of their sequence."""
    sharing = [name for name in ARCHITECTURES if _shares(tiny_config(name))]
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in sharing]


def _shares(config: Any) -> bool:
    is_alike = not depends_on_length(config) and not is_recurrent(config)
    return path_of(config).is_packed and is_alike and config.model_type != "phi"


def _results(model: CausalLM, batch: SequenceBatch, shared: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradients of a weighted sum of them."""
    model.zero_grad()
    log_probs, entropy = model(ModelInputs.of(batch, CPU, tree=PrefixTree.of(batch) if shared else None))
    (log_probs * torch.as_tensor(batch.advantages)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack([log_probs.detach(), entropy.detach()]), gradients


def _assert_same(model: CausalLM, batch: SequenceBatch) -> None:
    (alone, wanted), (shared, found) = (_results(model, batch, shares) for shares in (False, True))
    torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert wanted.keys() == found.keys() and largest > 1e-3
    for name, gradient in wanted.items():
        allowed = 1e-3 * float(gradient.abs().max()) + 1e-6 * max(1.0, largest)
        assert float((found[name] - gradient).abs().max()) <= allowed, name


@pytest.mark.parametrize("name", _cases())
def test_log_probs_and_gradients_are_those_without_sharing(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    batch = forked_batch()
    assert PrefixTree.of(batch).saved_share > 0.5
    _assert_same(load_model(tmp_path, torch.float32, chunk_tokens=16), batch)


def test_short_samples_that_share_most_of_their_tokens_give_the_same(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    batch = short_batch()
    assert PrefixTree.of(batch).saved_share > 0.5
    _assert_same(load_model(tmp_path, torch.float32, chunk_tokens=16), batch)


def test_an_adapter_gets_the_same_gradients(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, chunk_tokens=16)
    add_adapter(model, LoraConfig(rank=4, alpha=8))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    _assert_same(model, forked_batch())


def test_a_shared_token_counts_once_for_each_sequence_in_the_balance_of_experts(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, chunk_tokens=16)
    model.watch = watch_routers(model.lm, LearnerConfig.model_validate({"router": {"aux_loss_coefficient": 0.1}}))
    assert model.watch is not None
    losses, counts, gradients = [], [], []
    batch = forked_batch()
    for tree in (None, PrefixTree.of(batch)):
        model.zero_grad()
        model(ModelInputs.of(batch, CPU, tree=tree))
        balance = model.watch.balance()
        assert balance is not None
        balance.loss.backward()
        losses.append(float(balance.loss.detach()))
        counts.append(balance.counts)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(counts[1], counts[0])
    for alone, shared_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(shared_gradient, alone, atol=1e-5, rtol=1e-3)


def test_a_critic_has_the_same_values(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = load_scalar_model(tmp_path, torch.float32, key="learner.critic.path", make_head=True)
    torch.nn.init.normal_(model.lm.score.weight)
    batch = forked_batch()
    alone, shared = (ModelInputs.of(batch, CPU, tree=tree) for tree in (None, PrefixTree.of(batch)))
    torch.testing.assert_close(model(shared, shared.predicting), model(alone, alone.predicting), atol=1e-4, rtol=1e-4)


def test_tokens_with_other_experts_are_not_shared() -> None:
    batch = forked_batch()
    experts = np.zeros((len(batch.token_ids), 2, 2), dtype=np.int16)
    alike = PrefixTree.of(replace(batch, routed_experts=experts)).num_stored
    assert alike == PrefixTree.of(batch).num_stored
    experts[17] = 1  # in the prompt of the first sequence
    assert PrefixTree.of(replace(batch, routed_experts=experts)).num_stored > alike


@pytest.mark.parametrize(
    ("name", "share_prefixes", "roles"),
    [
        ("llama", True, {"policy", "reference"}),
        ("llama", False, set()),
        ("llama, dynamic rope", True, set()),
        ("jamba", True, set()),
        ("qwen3_next", True, set()),
        ("phi", True, set()),
    ],
)
def test_roles_whose_models_cannot_share_do_not(
    name: str, share_prefixes: bool, roles: set[str], tmp_path: Path
) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    config = validate({"model": {"path": str(tmp_path)}, "learner": {"share_prefixes": share_prefixes}}, "test")
    assert prefix_sharing_roles(config) == roles
