"""Shared prefixes on a GPU, where attention has other kernels than on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("these tests need a CUDA GPU", allow_module_level=True)

from penstock_learner.batches.partition import PrefixTree
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, load_model
from support.groups import equal_batch, forked_batch
from support.tiny_architectures import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
DEVICE = torch.device("cuda", 0)
KINDS = ["llama", "mistral", "gemma2, wide head", "gpt_oss", "llama4_text", "deepseek_v3"]
"""Flash attention without and with a window, FlexAttention with soft caps and sinks, chunks, values of another size."""


def _results(model: CausalLM, shared: bool, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a weighted sum of them."""
    model.zero_grad()
    log_probs, _ = model(ModelInputs.of(batch, DEVICE, tree=PrefixTree.of(batch) if shared else None))
    (log_probs * torch.as_tensor(batch.advantages, device=DEVICE)).sum().backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    return log_probs.detach(), gradient


@pytest.mark.parametrize("is_equal", [False, True], ids=["forks", "equal lengths"])
def test_long_prefixes_in_dense_parts_give_the_same(is_equal: bool, tmp_path: Path) -> None:
    """Prompts that are no multiple of a block, with forks; and prompts and responses of 1,024 tokens."""
    tiny_model("llama", head_dim=64, hidden_size=256, num_hidden_layers=2).save_pretrained(tmp_path)
    batch = equal_batch(1024) if is_equal else forked_batch(scale=70)
    inputs = ModelInputs.of(batch, DEVICE, tree=PrefixTree.of(batch))
    flash = inputs.packing.paths.flash  # type: ignore[union-attr]
    assert flash is not None and int((flash.dense[:, 1] > 0).sum()) == 2 and flash.equal == 1024 * is_equal
    _assert_as_near_to_float32(tmp_path, batch, chunk_tokens=512, at_most=1.2)


def _assert_as_near_to_float32(folder: Path, batch: SequenceBatch, *, chunk_tokens: int, at_most: float) -> None:
    """In bfloat16, sharing is as near to float32 as not sharing is, within a factor. Both round, and a token of a
    mixture of experts may be rounded to another expert, so the two are not compared with each other."""
    exact = load_model(folder, torch.float32, chunk_tokens=chunk_tokens).to(DEVICE)
    wanted, wanted_gradient = _results(exact, False, batch)
    model = load_model(folder, torch.bfloat16, chunk_tokens=chunk_tokens).to(DEVICE)
    errors = []
    for shared in (False, True):
        found, gradient = _results(model, shared, batch)
        of_gradient = torch.linalg.vector_norm(gradient - wanted_gradient)
        errors.append((float((found - wanted).abs().mean()), float(of_gradient)))
    print(errors, float(torch.linalg.vector_norm(wanted_gradient)))
    (alone, alone_gradient), (shared_error, shared_gradient) = errors
    assert shared_error < at_most * alone and shared_gradient < at_most * alone_gradient, errors


def _write_tiny(kind: str, folder: Path) -> None:
    sizes = {} if kind == "deepseek_v3" else {"head_dim": 32, "hidden_size": 128, "num_hidden_layers": 2}
    tiny_model(kind, **sizes).save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_give_the_same_log_probs_and_gradients(kind: str, tmp_path: Path) -> None:
    batch = forked_batch(scale=4)
    _write_tiny(kind, tmp_path)
    model = load_model(tmp_path, torch.float32, chunk_tokens=64).to(DEVICE)
    alone, alone_gradient = _results(model, False, batch)
    shared, shared_gradient = _results(model, True, batch)
    assert float((alone - shared).abs().max()) < 1e-4
    difference = torch.linalg.vector_norm(alone_gradient - shared_gradient)
    assert float(difference / torch.linalg.vector_norm(alone_gradient)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_are_as_exact_in_bfloat16(kind: str, tmp_path: Path) -> None:
    _write_tiny(kind, tmp_path)
    _assert_as_near_to_float32(tmp_path, forked_batch(scale=4), chunk_tokens=64, at_most=1.5)
