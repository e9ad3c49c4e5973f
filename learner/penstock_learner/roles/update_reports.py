"""What the ranks of a trained role report about an update.

The controller reads these reports, so this file imports nothing of the models: a controller starts in half the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_learner.algorithms.corrections import CorrectionStatistics, Mismatch
from penstock_learner.algorithms.losses import LossStatistics
from penstock_learner.optim.step import OptimizerStep


@dataclass(frozen=True)
class UpdateReport:
    """Sums over one rank's part of an update. The controller adds the sums of all ranks and then divides once."""

    loss: float
    """This rank's share of the policy loss."""
    kl: float
    """Sum of the KL penalty over trained tokens."""
    entropy: float
    """Sum of the entropy over trained tokens."""
    statistics: LossStatistics
    correction: CorrectionStatistics
    mismatch: Mismatch
    step: OptimizerStep
    """The step of the whole model, the same on every rank."""
    nonfinite: tuple[int, ...]
    """Indices of the micro-batches whose loss was not finite."""


@dataclass(frozen=True)
class CriticReport:
    """Sums over one rank's part of an update. The controller adds the sums of all ranks and then divides once."""

    loss: float
    """This rank's share of the value loss."""
    num_clipped: int
    """Trained tokens for which the clipped value gave the larger error."""
    step: OptimizerStep
    """The step of the whole model, the same on every rank."""
    nonfinite: tuple[int, ...] = ()
    """Indices of the micro-batches whose loss was not finite."""
