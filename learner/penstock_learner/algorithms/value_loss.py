"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.algorithms import ValueLossConfig
from penstock_learner.algorithms.segments import apply_mask


@dataclass(frozen=True)
class ValueLossOutputs:
    per_token: Tensor
    """[T] before aggregation, with the factor 1/2. Exactly 0 at masked-out tokens."""
    num_clipped: Tensor
    """Tokens for which the clipped value gave the larger error. Without gradient."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, config: ValueLossConfig
) -> ValueLossOutputs:
    """`max((v - ret)^2, (clip(v, v_old - c, v_old + c) - ret)^2) / 2` for each token."""
    values, old_values, returns = (apply_mask(tensor, mask) for tensor in (values, old_values, returns))
    clipped = torch.clamp(values, old_values - config.clip, old_values + config.clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    num_clipped = (mask.bool() & (clipped_error > error)).sum()
    return ValueLossOutputs(0.5 * torch.maximum(error, clipped_error), num_clipped)
