"""What advantages and losses share: sums, means and recurrences over packed sequences, the aggregation of per-token
losses to one number, and functions by name.

A segment is a run of tokens with the same `segment_ids` value. An aggregation's denominators count the whole batch,
on all ranks and in all micro-batches. Each call returns its micro-batch's share, and the shares add up to the loss of
the whole batch however it was split. If the ranks average their gradients (FSDP) instead of adding them, multiply by
the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from penstock.config.algorithms import Aggregation, check_name
from penstock.errors import ConfigError
from penstock.user_code import load_callable

_WHITEN_EPSILON = 1e-8


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is nonzero, else exactly 0. NaN and infinity there reach neither value nor gradient."""
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
    """`x[t] = values[t] + decay * x[t + 1]` within each segment of the sorted `segment_ids`. Computed by doubling:
    after round k, `x[t]` holds the first 2^k terms and `reach[t]` is decay^(2^k), or 0 if the segment ends before. This
    takes log2(T) vector operations for all sequences at once."""
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


# ── aggregation ──


@dataclass(frozen=True)
class Denominators:
    """The counts that the loss of a whole batch is divided by."""

    num_tokens: int
    """Trained tokens, before any rejection."""
    num_sequences: int
    """Sequences with at least one trained token. A sequence that only fills up a rank (`without_loss`) has none."""
    constant_length: int | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens."""

    @classmethod
    def of(cls, mask: Tensor, sequence_ids: Tensor, constant_length: int | None = None) -> Denominators:
        trained = sequence_ids[mask.bool()]
        return cls(int(trained.shape[0]), int(torch.unique(trained).shape[0]), constant_length)


def aggregate(
    per_token: Tensor, mask: Tensor, sequence_ids: Tensor, mode: Aggregation, denominators: Denominators
) -> Tensor:
    """This micro-batch's share of the batch's loss, a 0-d tensor. `mask` is the one that the denominators counted.
    Rejected tokens stay in it with a loss of 0, so rejecting tokens never increases the weight of the others.

        token-mean                `sum_t l_t / num_tokens`: a long sequence has more weight
        token-sum                 `sum_t l_t`, divided by nothing: a larger batch has larger gradients
        seq-mean-token-sum        `sum_s sum_t l_t / num_sequences`
        seq-mean-token-mean       `sum_s mean_t l_t / num_sequences`: every sequence has the same weight
        seq-mean-token-sum-norm   `sum_s sum_t l_t / (num_sequences * constant_length)`: no length bias (Dr.GRPO)
    """
    num_sequences, length = max(denominators.num_sequences, 1), denominators.constant_length
    total = apply_mask(per_token, mask).sum()
    match mode:
        case "token-mean":
            return total / max(denominators.num_tokens, 1)
        case "token-sum":
            return total
        case "seq-mean-token-sum":
            return total / num_sequences
        case "seq-mean-token-mean":
            means = segment_mean(per_token, mask, sequence_ids, count_segments(sequence_ids))
            return means.sum() / num_sequences
        case "seq-mean-token-sum-norm":
            if length is None:
                raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
            return total / num_sequences / length


# ── functions by name ──

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def find_function(kind: str, name: str, known: Mapping[str, FunctionT]) -> FunctionT:
    """The known function called `name`, or the one that `path/file.py:function` or `package.module:function` names.
    Raises ValueError for an unknown name, and suggests the nearest known one. Raises ConfigError for a path that cannot
    be imported, or whose function does not take two arguments."""
    check_name(kind, name, tuple(known))
    if name in known:
        return known[name]
    key = f"learner.algorithm.{kind}.name"
    function = load_callable(name, key)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{key}: {name} must take the inputs and the config: {error}") from error
    return cast(FunctionT, function)
