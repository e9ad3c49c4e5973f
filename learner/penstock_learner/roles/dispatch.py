"""What the controller knows of the workers: how a call is split over the ranks, and what they report about an update.

A method of a worker declares how a call is split and how the results are joined:

    class TeacherWorker(Rank):
        @dispatched(split="sequences", join="tokens")
        def log_probs(self, part: RankShard) -> NDArray[np.float32]: ...

A step then calls `await roles.teacher.log_probs(batch)`. Each rank gets its part of the batch, and the step gets one
array in the order of the batch's tokens. This file imports neither torch nor models: a controller reads it before it
starts Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock_learner.algorithms.losses import CorrectionStatistics, LossStatistics, Mismatch
    from penstock_learner.optim.optimizer import OptimizerStep

Split = Literal["sequences", "copies"]
Join = Literal["tokens", "sequences", "reports", "ranks"]
"""`tokens`: a rank returns one number per response token of its micro-batches, and the caller gets [T] numbers in the
batch's order. `sequences`: the same with one number per sequence. `reports`: a rank takes an optimizer step and returns
its report; the caller gets an `Update`. `ranks`: the caller gets the list of all ranks' results."""
JOINS: dict[Split, tuple[Join, ...]] = {"sequences": ("tokens", "sequences", "reports"), "copies": ("ranks",)}
"""The joins that go with each split. `sequences`: each rank gets a RankShard in place of the batch, its first argument.
`copies`: all get the same."""
_ATTRIBUTE = "__penstock_dispatch__"
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def dispatched(*, split: Split = "sequences", join: Join = "tokens") -> Callable[[MethodT], MethodT]:
    """Declare that steps may call this method of a worker, and how its batch is split and its results are joined."""
    if join not in JOINS.get(split, ()):
        raise ValueError(f"split {split!r} cannot be joined by {join!r}; choose {' or '.join(JOINS.get(split, ()))}")

    def declare(method: MethodT) -> MethodT:
        setattr(method, _ATTRIBUTE, join)
        return method

    return declare


def declarations(worker: type) -> dict[str, Join]:
    """The joins of a worker class's declared methods, by name. A method that overrides a declared one keeps its join,
    unless it has its own."""
    found: dict[str, Join] = {}
    for base in reversed(worker.__mro__):
        for name, member in vars(base).items():
            if (own := getattr(member, _ATTRIBUTE, None)) is not None:
                found[name] = own
    return found


@dataclass(frozen=True)
class TrainedReport:
    """What every trained role reports about one rank's part of an update. The controller adds the sums of all
    ranks and then divides once."""

    loss: float
    """This rank's share of the loss."""
    step: OptimizerStep
    """The step of the whole model, the same on every rank."""
    nonfinite: tuple[int, ...]
    """Indices of the micro-batches whose loss was not finite."""


@dataclass(frozen=True)
class UpdateReport(TrainedReport):
    """An update of the policy."""

    kl: float
    """Sum of the KL penalty over trained tokens."""
    entropy: float
    """Sum of the entropy over trained tokens."""
    statistics: LossStatistics
    correction: CorrectionStatistics
    mismatch: Mismatch
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
class CriticReport(TrainedReport):
    num_clipped: int
    """Trained tokens for which the clipped value gave the larger error."""


@dataclass(frozen=True)
class RankUsage:
    """Memory and device of one rank at one moment."""

    memory_peak_bytes: int
    """Peak of the device's allocator, or on a CPU, peak of the process."""
    device_name: str
    num_parameters: int
    """Parameters of the whole model. For a mixture of experts, the ones that one token passes through."""
    memory_reserved_bytes: int = 0
    """Peak of what the device's allocator holds, with what it has cached. 0 on a CPU."""
    host_memory_bytes: int = 0
    """What is used of the memory of its machine or container, by any process. 0 if it is not known."""
