"""Fused experts: one grouped product gives what one expert after the other gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from penstock_learner.model.experts import compute_experts, grouped_product
from support.tiny_architectures import tiny_model


def _one_after_the_other(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = type(module).forward.__wrapped__(module, states, chosen, weights)
    return result


def _computed(function: Any, module: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The output, and the gradients of states, weights of the choice, and parameters. Expert 2 has no token."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(11, 32, generator=generator, dtype=dtype, requires_grad=True)
    weights = torch.rand(11, 2, generator=generator, dtype=dtype).requires_grad_()
    chosen = torch.tensor([[0, 1], [1, 3], [3, 0]])[torch.randint(3, (11,), generator=generator)]
    module.zero_grad()
    output = function(module, states, chosen, weights)
    (output * torch.linspace(-1, 1, 32, dtype=dtype)).sum().backward()
    assert states.grad is not None and weights.grad is not None
    return output.detach(), states.grad, weights.grad, *(parameter.grad for parameter in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_grouped_experts_are_one_after_the_other(name: str, dtype: torch.dtype) -> None:
    module = tiny_model(name).model.layers[0].mlp.experts.to(dtype)
    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.1}
    wanted = _computed(_one_after_the_other, module, dtype)
    torch.testing.assert_close(_computed(compute_experts, module, dtype), wanted, **close)


def test_a_product_whose_sizes_torch_does_not_group_is_the_same() -> None:
    rows, weights = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    experts = torch.tensor([0, 0, 2, 2, 2, 2, 3])
    wanted = torch.einsum("si,sio->so", rows, weights[experts])
    torch.testing.assert_close(grouped_product(rows, weights, ends), wanted)
    narrow = grouped_product(rows.bfloat16(), weights.bfloat16(), ends)
    torch.testing.assert_close(narrow.double(), wanted, atol=0.05, rtol=0.05)
    assert gradcheck(lambda *both: grouped_product(*both, ends), (rows.requires_grad_(), weights.requires_grad_()))
