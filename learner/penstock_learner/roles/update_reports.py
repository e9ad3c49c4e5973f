"""What the ranks of a trained role report about an update.

The controller reads these reports, so this file imports nothing of the models: a controller starts in half the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock_learner.algorithms.corrections import CorrectionStatistics, Mismatch
from penstock_learner.algorithms.losses import LossStatistics
from penstock_learner.optim import OptimizerStep


class TrainedReport(Protocol):
    """What every trained role reports about one rank's part of an update."""

    @property
    def loss(self) -> float: ...
    @property
    def step(self) -> OptimizerStep: ...
    @property
    def nonfinite(self) -> tuple[int, ...]: ...


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
    routers: RouterReport | None = None
    """What the routers of a mixture of experts did. None if they are not watched."""
    proximal: NDArray[np.float32] | None = None
    """[T] log-probs of this rank's micro-batches before the step, concatenated, if the update computed them itself."""


@dataclass(frozen=True)
class RouterReport:
    """How the routers used the experts in one rank's part of an update."""

    aux_loss: float
    """This rank's share of the auxiliary loss, before its coefficient."""
    counts: NDArray[np.float32]
    """[routers, experts] how often each expert was chosen."""
    replayed_share: float
    """Share of the choices that were replayed, summed over micro-batches as the auxiliary loss is."""


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
