"""Attention over packed sequences: each token sees the earlier tokens of its own sequence, and nothing else.

The linear layers run on the packed tokens without padding. Attention has two ways, which agree:

| way    | where                  | how                                                                              |
|--------|------------------------|----------------------------------------------------------------------------------|
| varlen | CUDA in half precision | `torch.nn.attention.varlen`: flash attention over the packed tokens as they are   |
| padded | everywhere else        | tokens go into a right-padded [sequences, longest] block, where plain causal      |
|        |                        | attention is exact (no token looks right, so none sees padding), and back         |

Under sequence parallelism a rank holds a slice of the tokens; `sequence_parallel.py` trades it for one of the heads.
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

from penstock_learner.sequence_parallel import SequenceParallel

varlen_attn: Callable[..., Any] | None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch built without flash attention: the padded way is always there
    varlen_attn = None

NAME = "penstock_packed"
_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
"""They differ between releases of torch."""
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _VARLEN_PARAMETERS else {"is_causal": True}


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a micro-batch lie. Built once, used by every layer."""

    gather: Tensor
    """[S, L] index of the packed token; padding points at token 0."""
    rows: Tensor
    """[N] sequence of each packed token."""
    columns: Tensor
    """[N] position of each packed token in its sequence: also its position id."""
    offsets: Tensor
    """[S + 1] where each sequence begins, and the end."""
    longest: int
    """Tokens of the longest sequence."""
    parallel: SequenceParallel | None = None
    """Set where each rank holds a slice of the tokens."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device, parallel: SequenceParallel | None = None) -> Packing:
        """`lengths` are the tokens of each sequence, with their prompts. Made on the host: no wait for the device."""
        num_sequences, num_tokens, longest = len(lengths), int(lengths.sum()), int(lengths.max())
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(num_sequences), lengths)
        columns = np.arange(num_tokens) - starts[rows]
        gather = np.zeros((num_sequences, longest), dtype=np.int64)
        gather[rows, columns] = np.arange(num_tokens)
        offsets = np.append(starts, num_tokens).astype(np.int32)
        on_device = [torch.as_tensor(array, device=device) for array in (gather, rows, columns, offsets)]
        return cls(on_device[0], on_device[1], on_device[2], on_device[3], longest, parallel)


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
    """Hugging Face's attention signature: query [1, heads, N, dim] to output [1, N, heads, dim]."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if packing.parallel is not None:
        q, k, v = packing.parallel.scatter_heads(q, k, v, len(packing.rows))
    is_flash = varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    output = (_varlen if is_flash else _padded)(q, k, v, packing, scaling)
    if packing.parallel is not None:
        output = packing.parallel.gather_heads(output)
    return output.unsqueeze(0), None


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """[N, heads, dim] each."""
    options = dict(_CAUSAL)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _VARLEN_PARAMETERS:
            options["enable_gqa"] = True
        else:
            k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
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
    """[N, heads, dim] each."""
    q, k, v = (states[packing.gather].transpose(1, 2) for states in (q, k, v))
    output = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)[packing.rows, packing.columns]


def register() -> None:
    """Make the name known to Hugging Face models."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
