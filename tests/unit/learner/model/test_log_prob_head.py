"""Chunked log-probs and entropies equal those of the whole logit matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock_learner.model.architectures import LogitForm
from penstock_learner.model.causal_lm import log_probs_and_entropy


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(300, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(300, (50,), generator=generator)
    temperatures = torch.where(torch.arange(50) % 3 == 0, 0.6, 1.0)
    upstream = torch.randn(50, generator=generator)
    return hidden, weight, targets, temperatures, upstream


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.t()).float() / temperatures.unsqueeze(1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1), entropy


@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 1000])
def test_chunks_equal_the_whole(chunk_tokens: int) -> None:
    hidden, weight, targets, temperatures, upstream = inputs()
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad((log_probs * upstream).sum(), [hidden, weight])
    expected, expected_entropy = plain(hidden, weight, targets, temperatures)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), [hidden, weight])
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_the_entropy_has_a_gradient_if_asked_for(chunk_tokens: int, softcap: float | None) -> None:
    hidden, weight, targets, temperatures, upstream = inputs()
    log_probs, entropy = log_probs_and_entropy(
        hidden, weight, targets, temperatures, chunk_tokens=chunk_tokens, form=LogitForm(softcap=softcap),
        entropy_has_gradient=True,
    )  # fmt: skip
    gradients = torch.autograd.grad((log_probs * upstream).sum() - (entropy * upstream).sum(), [hidden, weight])
    logits = hidden @ weight.t()
    scaled = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperatures.unsqueeze(1)
    expected = scaled.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    expected_entropy = torch.distributions.Categorical(logits=scaled).entropy()
    loss = (expected * upstream).sum() - (expected_entropy * upstream).sum()
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, [hidden, weight]), atol=1e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets, temperatures, _ = inputs()
    weight.requires_grad_(False)
    log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=7)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_half_precision_sums_gradients_in_single() -> None:
    hidden, weight, targets, temperatures, upstream = inputs(torch.bfloat16)
    log_probs, _ = log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=1)
    gradients = torch.autograd.grad((log_probs * upstream).sum(), [hidden, weight])
    whole, _ = log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=50)
    expected = torch.autograd.grad((whole * upstream).sum(), [hidden, weight])
    assert log_probs.dtype == torch.float32 and gradients[0].dtype == gradients[1].dtype == torch.bfloat16
    torch.testing.assert_close(gradients, expected, atol=0.02, rtol=0.02)


def test_half_precision_on_a_cpu_multiplies_row_major_factors_only() -> None:
    """torch on ARM sends other products to oneDNN, which fails with a warning on CPUs without bfloat16 instructions."""
    hidden, weight, targets, temperatures, _ = inputs(torch.bfloat16)
    right_factors = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func._schema.name == "aten::mm":
                right_factors.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=20)[0].sum().backward()
    assert len(right_factors) == 3 + 3 * 3, "three chunks forward; three blocks backward, with three products each"
    assert all(factor.is_contiguous() for factor in right_factors)


def test_large_logits_keep_their_digits() -> None:
    hidden, weight, targets, temperatures, _ = inputs()
    log_probs, entropy = log_probs_and_entropy(hidden * 100, weight, targets, temperatures, chunk_tokens=7)
    assert torch.isfinite(log_probs).all()
    assert (entropy >= -1e-4).all()


def test_logits_are_never_whole() -> None:
    hidden, weight, targets, temperatures, _ = inputs()
    num_elements = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            num_elements.extend(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    with Watch():
        log_probs_and_entropy(hidden, weight, targets, temperatures, chunk_tokens=20)[0].sum().backward()
    assert max(num_elements) == 50 * 128, "a block of the vocabulary is a multiple of 128"
