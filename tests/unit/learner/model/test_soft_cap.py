"""The soft cap is tanh, in numbers and in gradients."""

from __future__ import annotations

import pytest
import torch

from penstock_learner.model.attention.packed_attention import soft_cap


@pytest.mark.parametrize("cap", [2.0, 30.0, 50.0])
def test_the_soft_cap_is_that_of_tanh(cap: float) -> None:
    values = torch.cat([torch.linspace(-8 * cap, 8 * cap, 2001), torch.tensor([0.0, 1e-4, -1e-4, 1e4, -1e4])])
    own, plain = (values.clone().requires_grad_() for _ in range(2))
    capped, wanted = soft_cap(own, cap), cap * torch.tanh(plain / cap)
    capped.sum().backward()
    wanted.sum().backward()
    assert float((capped - wanted).detach().abs().max()) <= 3e-7 * cap
    assert own.grad is not None and plain.grad is not None
    assert float((own.grad - plain.grad).abs().max()) <= 1e-6
