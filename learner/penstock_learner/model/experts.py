"""The experts of a mixture, whose weights a layer holds fused: one grouped product computes all of them.

Tokens are sorted by expert, so each expert's weights meet their tokens as neighbouring rows. Where torch has no grouped
product that can be compiled, an operator that the compiler does not look into takes one expert after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = "penstock_grouped"
_ALIGNED = 8
"""torch's grouped product takes rows whose length is a multiple of 16 bytes."""


def register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)


def compute_experts(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Hugging Face's signature: states [N, H], and [N, top_k] the experts of each token and their weights. A token's
    result is the weighted sum of its experts' outputs."""
    top_k = chosen.shape[-1]
    experts, order = chosen.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(module.num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True).int()
    copies = states.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, states.shape[-1])
    rows: Tensor = _Reordered.apply(copies, order, inverse)  # type: ignore[no-untyped-call]
    inner = _product(module, "gate_up_proj" if module.has_gate else "up_proj", rows, experts, ends)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _product(module, "down_proj", inner, experts, ends)
    outputs: Tensor = _Reordered.apply(outer, inverse, order)  # type: ignore[no-untyped-call]
    outputs = outputs.view(*chosen.shape, -1) * weights.unsqueeze(-1)
    return outputs.sum(dim=1).to(states.dtype)


def _product(module: Any, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    weights = getattr(module, name)
    result = grouped_product(rows, weights if module.is_transposed else weights.transpose(1, 2), ends)
    adapter = getattr(module, "adapters", {}).get(name)
    if adapter is not None and not adapter.disable_adapters:
        result = result + _of_adapter(adapter, rows, ends)
    return result + getattr(module, f"{name}_bias")[experts] if module.has_bias else result


def _of_adapter(adapter: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """What a low-rank adapter adds to a product, without its sum with the weights, which would need their memory."""
    low, up = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    scale: float = adapter.scaling["default"]
    low = low.unflatten(0, (len(ends), -1)).transpose(1, 2)
    up = up.unflatten(1, (-1, len(ends))).permute(2, 1, 0)
    missing = -low.shape[2] % _ALIGNED
    low, up = functional.pad(low, (0, missing)), functional.pad(up, (0, 0, 0, missing))
    return grouped_product(grouped_product(rows, low, ends), up.contiguous(), ends) * scale


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, out]: rows [S, in] times the weights [experts, in, out] of their expert. Those of expert `i` end before row
    `ends[i]`."""
    rows = rows.to(weights.dtype)
    if weights.dtype == torch.bfloat16 and weights.shape[1] % _ALIGNED == weights.shape[2] % _ALIGNED == 0:
        result: Tensor = functional.grouped_mm(rows, weights, offs=ends)
    else:
        result = _one_by_one(rows, weights, ends)
    return result


def adapt_experts(lm: nn.Module) -> None:
    """Have fused experts add the adapters that peft has put around them."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in lm.modules():
        if isinstance(module, ParamWrapper):
            experts = module.get_base_layer()
            experts.adapters = {**getattr(experts, "adapters", {}), module.parameter_name: module}
            kind: Any = type(module)
            module.__class__ = _passing(kind)


@cache
def _passing(kind: Any) -> type[nn.Module]:
    """peft's own forward pass would add the adapter to the weights."""

    def forward(self: Any, *args: Any, **others: Any) -> Any:
        return self.base_layer(*args, **others)

    return type(kind.__name__, (kind,), {"forward": forward})


class _Reordered(torch.autograd.Function):
    """Rows in another order. Their gradient is put back: torch would add it up, as if rows could be taken twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.saved_tensors[0]], None, None


# ── the grouped product as an operator of torch ──


@torch.library.custom_op("penstock::grouped_product", mutates_args=())
def _one_by_one(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    result = rows.new_zeros(len(rows), weights.shape[2])
    for expert, own in _slices(ends):
        torch.mm(rows[own], weights[expert], out=result[own])
    return result


@torch.library.custom_op("penstock::grouped_product_of_weights", mutates_args=())
def _of_weights(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """[experts, in, out]: the gradient of the weights."""
    result = rows.new_zeros(len(ends), rows.shape[1], gradient.shape[1])
    for expert, own in _slices(ends):
        torch.mm(rows[own].t(), gradient[own], out=result[expert])
    return result


def _slices(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@_one_by_one.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@_of_weights.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    needs_rows, needs_weights, _ = ctx.needs_input_grad
    return (
        _one_by_one(gradient, weights.transpose(1, 2), ends) if needs_rows else None,
        _of_weights(rows, gradient, ends) if needs_weights else None,
        None,
    )


_one_by_one.register_autograd(_backward, setup_context=_save)
