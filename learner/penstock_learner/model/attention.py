"""Attention over packed sequences: each token sees the earlier tokens of its own sequence, and nothing else.

The linear layers run on the packed tokens without padding. Attention has two implementations with the same result:

| name   | used                       | how                                                                          |
|--------|----------------------------|------------------------------------------------------------------------------|
| varlen | on CUDA in half precision  | `torch.nn.attention.varlen`: flash attention over the packed tokens          |
| padded | everywhere else, and where | Tokens are copied into a right-padded [sequences, longest] block and back.   |
|        | sequences are of about     | Causal attention is exact there: no token looks right, so none sees padding. |
|        | equal length               | On Hopper it runs on cuDNN, in two thirds of the time of torch's flash.      |

Under sequence parallelism a rank holds a slice of the tokens. `sequence_parallel.py` exchanges it for a slice of the
heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock_learner.model.device_copies import to_device
from penstock_learner.model.sequence_parallel import SequenceParallel

varlen_attn: Callable[..., Any] | None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch that was built without flash attention
    varlen_attn = None

NAME = "penstock_packed"
_BLOCK_TOKENS = 512
"""On a GPU the width of a padded block is a multiple of this."""
_FULL = 1.1
"""A padded block counts as full if its size is at most this many times the tokens."""
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
"""The parameters differ between releases of torch."""
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _VARLEN_PARAMETERS else {"is_causal": True}


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch: N tokens of S sequences. It is built once and used by every layer."""

    gather: Tensor
    """[S, L] index of the packed token; padding points at token 0."""
    is_token: Tensor
    """[S, L] false at padding."""
    rows: Tensor
    """[N] sequence of each packed token."""
    columns: Tensor
    """[N] position of each packed token in its sequence, which is also its position id."""
    offsets: Tensor
    """[S + 1] where each sequence begins, followed by N."""
    longest: int
    """Tokens of the longest sequence."""
    is_full: bool
    """Whether the padded block has little padding."""
    is_even: bool
    """Whether the padded block has no padding at all. The packed tokens can then be used as they are."""
    parallel: SequenceParallel | None = None
    """Set if each rank holds a slice of the tokens."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device, parallel: SequenceParallel | None = None) -> Packing:
        """The layout of sequences with these `lengths`, in tokens, prompt included. It is computed on the host, which
        does not wait for the device."""
        num_sequences, num_tokens, longest = len(lengths), int(lengths.sum()), int(lengths.max())
        # cuDNN makes a plan for every new shape. Rounding up keeps the number of shapes low.
        width = -(-longest // _BLOCK_TOKENS) * _BLOCK_TOKENS if device.type == "cuda" else longest
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(num_sequences), lengths)
        columns = np.arange(num_tokens) - starts[rows]
        gather = np.zeros((num_sequences, width), dtype=np.int64)
        gather[rows, columns] = np.arange(num_tokens)
        return cls(
            gather=to_device(gather, device),
            is_token=to_device(np.arange(width) < lengths[:, None], device),
            rows=to_device(rows, device),
            columns=to_device(columns, device),
            offsets=to_device(np.append(starts, num_tokens).astype(np.int32), device),
            longest=longest,
            is_full=num_sequences * width <= _FULL * num_tokens,
            is_even=num_sequences * width == num_tokens,
            parallel=parallel,
        )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with Hugging Face's signature. `query` is [1, heads, N, dim], the output [1, N, heads, dim]."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if packing.parallel is not None:
        q, k, v = packing.parallel.scatter_heads(q, k, v, len(packing.rows))
    has_flash = varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    output = (_varlen if has_flash and not packing.is_full else _padded)(q, k, v, packing, scaling)
    if packing.parallel is not None:
        output = packing.parallel.gather_heads(output)
    return output.unsqueeze(0), None


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Inputs and output are [N, heads, dim]."""
    options = dict(_CAUSAL)
    if "enable_gqa" in _VARLEN_PARAMETERS:  # releases without the parameter do it by themselves
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    if scaling is not None:
        if "scale" in _VARLEN_PARAMETERS:
            options["scale"] = scaling
        else:
            q = q * (scaling * q.shape[2] ** 0.5)
    offsets, longest = packing.offsets, packing.longest
    assert varlen_attn is not None
    attended: Tensor = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    return attended


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Inputs and output are [N, heads, dim]."""
    q, k, v = (_to_block(states, packing).transpose(1, 2) for states in (q, k, v))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _from_block(output.transpose(1, 2), packing)


def _to_block(states: Tensor, packing: Packing) -> Tensor:
    """[N, …] to [S, L, …]."""
    if packing.is_even:
        block: Tensor = states.unflatten(0, packing.gather.shape)
        return block
    apply: Callable[..., Tensor] = _ToBlock.apply
    return apply(states, packing.gather, packing.rows, packing.columns)


def _from_block(block: Tensor, packing: Packing) -> Tensor:
    """[S, L, …] to [N, …]."""
    if packing.is_even:
        return block.flatten(0, 1)
    apply: Callable[..., Tensor] = _FromBlock.apply
    return apply(block, packing.gather, packing.is_token, packing.rows, packing.columns)


class _ToBlock(torch.autograd.Function):
    """Padding gets no gradient, because only queries that are padding themselves see it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, gather: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        return states[gather]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        return gradient[rows, columns], None, None, None


class _FromBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, gather: Tensor, is_token: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(gather, is_token)
        return block[rows, columns]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gather, is_token = ctx.saved_tensors
        return gradient[gather] * is_token[:, :, None, None], None, None, None, None


def register() -> None:
    """Register packed attention with Hugging Face under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
