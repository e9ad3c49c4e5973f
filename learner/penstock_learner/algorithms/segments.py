"""Sums, means and recurrences over packed sequences.

A segment is a run of tokens with the same `segment_ids` value. Every function is
differentiable unless its docstring says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WHITEN_EPSILON = 1e-8


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is nonzero, exactly 0 elsewhere. NaN and infinity at masked-out tokens reach neither the
    value nor the gradient."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def count_segments(segment_ids: Tensor) -> int:
    """The largest id plus one, or 0 without tokens."""
    return int(segment_ids.max()) + 1 if segment_ids.numel() else 0


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """`out[s] = sum of values[t] where segment_ids[t] == s`; 0 for an empty segment."""
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def segment_min(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """`out[s] = min of values[t] where segment_ids[t] == s`; 0 for an empty segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segment_ids, values, "amin", include_self=False)


def segment_mean(values: Tensor, mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Mean over the trained tokens of each segment; 0 for a segment without any."""
    total = segment_sum(apply_mask(values, mask), segment_ids, num_segments)
    return total / segment_sum(mask.bool().to(values.dtype), segment_ids, num_segments).clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all trained tokens; 0 if there are none."""
    return apply_mask(values, mask).sum() / mask.bool().sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) * rsqrt(unbiased var + 1e-8)` over the trained tokens, 0 elsewhere. A single token gives 0."""
    centered = apply_mask(values - masked_mean(values, mask), mask)
    variance = centered.square().sum() / (mask.bool().sum() - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + _WHITEN_EPSILON)


def shift_left(values: Tensor, segment_ids: Tensor) -> Tensor:
    """`out[t] = values[t + 1]` within a segment, 0 at the last token of each."""
    following = torch.zeros_like(values)
    following[:-1] = torch.where(segment_ids[1:] == segment_ids[:-1], values[1:], following[:-1])
    return following


def reverse_scan(values: Tensor, decay: float, segment_ids: Tensor) -> Tensor:
    """`x[t] = values[t] + decay * x[t + 1]` within each segment, with nothing after its last token.

    Computed by doubling: after round k, `x[t]` holds the first 2^k terms and `reach[t]` is decay^(2^k), or 0 if the
    segment ends before. This takes log2(T) vector operations for all sequences at once, without padding. `segment_ids`
    must be sorted.
    """
    total = values.clone()
    reach = shift_left(torch.full_like(values, decay), segment_ids)
    stride = 1
    while stride < values.numel():
        total[:-stride] = total[:-stride] + reach[:-stride] * total[stride:]
        reach[:-stride] = reach[:-stride] * reach[stride:]
        stride *= 2
    return total


def reverse_scan_masked(values: Tensor, decay: float, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """`reverse_scan` over the trained tokens only: `x` skips masked-out tokens and is 0 on them."""
    trained = mask.bool().nonzero().squeeze(1)
    scanned = torch.zeros_like(values)
    scanned[trained] = reverse_scan(values[trained], decay, segment_ids[trained])
    return scanned
