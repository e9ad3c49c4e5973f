"""Aggregation of per-token losses to one number, with global denominators.

The denominators count the whole batch: all data-parallel ranks and all gradient-accumulation micro-batches. Each call
returns its micro-batch's share, and the shares add up to the loss of the whole batch however it was split. Sequences
are never split. If the ranks average their gradients (FSDP, DDP) instead of adding them, multiply by the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.algorithms import Aggregation
from penstock_learner.algorithms.registry import Registry
from penstock_learner.algorithms.segments import apply_mask, count_segments, segment_mean


@dataclass(frozen=True)
class Denominators:
    """The counts that the loss of a whole batch is divided by. `a + b` joins the counts of two parts of it."""

    num_tokens: int
    """Trained tokens, before any rejection."""
    num_sequences: int
    """Sequences with at least one trained token. A sequence that only fills up a rank (`without_loss`) has none."""
    constant_length: int | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens."""

    @classmethod
    def of(cls, mask: Tensor, sequence_ids: Tensor, constant_length: int | None = None) -> Denominators:
        """The counts of a batch, or of a rank's part of it."""
        trained = sequence_ids[mask.bool()]
        return cls(int(trained.shape[0]), int(torch.unique(trained).shape[0]), constant_length)

    def __add__(self, other: Denominators) -> Denominators:
        assert self.constant_length == other.constant_length
        return Denominators(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences, self.constant_length
        )


AggregationFunction = Callable[[Tensor, Tensor, Tensor, Denominators], Tensor]


def token_mean(per_token: Tensor, mask: Tensor, sequence_ids: Tensor, denominators: Denominators) -> Tensor:
    """`sum_t l_t / num_tokens`: every token has the same weight, so a long sequence has more."""
    return apply_mask(per_token, mask).sum() / max(denominators.num_tokens, 1)


def token_sum(per_token: Tensor, mask: Tensor, sequence_ids: Tensor, denominators: Denominators) -> Tensor:
    """`sum_t l_t`, divided by nothing: a larger batch has larger gradients."""
    return apply_mask(per_token, mask).sum()


def seq_mean_token_sum(per_token: Tensor, mask: Tensor, sequence_ids: Tensor, denominators: Denominators) -> Tensor:
    """`sum_s sum_t l_t / num_sequences`."""
    return apply_mask(per_token, mask).sum() / max(denominators.num_sequences, 1)


def seq_mean_token_mean(per_token: Tensor, mask: Tensor, sequence_ids: Tensor, denominators: Denominators) -> Tensor:
    """`sum_s mean_t l_t / num_sequences`: every sequence has the same weight."""
    means = segment_mean(per_token, mask, sequence_ids, count_segments(sequence_ids))
    return means.sum() / max(denominators.num_sequences, 1)


def seq_mean_token_sum_norm(
    per_token: Tensor, mask: Tensor, sequence_ids: Tensor, denominators: Denominators
) -> Tensor:
    """`sum_s sum_t l_t / (num_sequences * constant_length)`: no length bias (Dr.GRPO)."""
    if denominators.constant_length is None:
        raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
    return seq_mean_token_sum(per_token, mask, sequence_ids, denominators) / denominators.constant_length


AGGREGATIONS: Registry[AggregationFunction] = Registry(
    "aggregation",
    {
        "token-mean": token_mean,
        "token-sum": token_sum,
        "seq-mean-token-sum": seq_mean_token_sum,
        "seq-mean-token-mean": seq_mean_token_mean,
        "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    },
)


def aggregate(
    per_token: Tensor, mask: Tensor, sequence_ids: Tensor, mode: Aggregation, denominators: Denominators
) -> Tensor:
    """This micro-batch's share of the batch's loss, a 0-d tensor.

    `mask` is the one that the denominators counted. Rejected tokens stay in it with a loss of 0 (`Correction.apply`),
    so rejecting tokens never increases the weight of the others.
    """
    return AGGREGATIONS.get(mode)(per_token, mask, sequence_ids, denominators)
