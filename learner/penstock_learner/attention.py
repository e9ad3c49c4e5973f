"""Attention over packed sequences: each token sees the earlier tokens of its own sequence, and nothing else.

The linear layers run on the packed tokens without padding. Attention alone scatters them into a right-padded
[sequences, longest] block, where plain causal attention is exact (no token looks right, so none sees padding), and
gathers the result back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "penstock_packed"


@dataclass(frozen=True)
class Packing:
    """Where each packed token lies in the padded block. Built once for a micro-batch, used by every layer."""

    gather: Tensor
    """[S, L] index of the packed token; padding points at token 0."""
    rows: Tensor
    """[N] sequence of each packed token."""
    columns: Tensor
    """[N] position of each packed token in its sequence: also its position id."""

    @classmethod
    def of(cls, lengths: Tensor) -> Packing:
        """`lengths` are the tokens of each sequence, prompts included."""
        num_sequences, longest = len(lengths), int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(torch.arange(num_sequences, device=lengths.device), lengths)
        columns = torch.arange(len(rows), device=lengths.device) - starts[rows]
        gather = torch.zeros(num_sequences, longest, dtype=torch.int64, device=lengths.device)
        gather[rows, columns] = torch.arange(len(rows), device=lengths.device)
        return cls(gather, rows, columns)


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
    q, k, v = (states[0].transpose(0, 1)[packing.gather].transpose(1, 2) for states in (query, key, value))
    output = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)[packing.rows, packing.columns].unsqueeze(0), None


def register() -> None:
    """Make the name known to Hugging Face models."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
