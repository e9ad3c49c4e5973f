"""Optimizers, clipping and learning-rate schedules. What a step reports is here, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of a step. It is the same on every rank."""

    grad_norm: float
    """Norm of the whole model's gradient, before clipping."""
    lr: float
    skipped: bool
    """True when the loss or the gradient was not finite. The weights are then unchanged."""
