"""A term: the time during which one learner, and no other, trains a run. It starts from a checkpoint. The term owns the
ledger, the manifests and the lineage, and is the only one that changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.config.algorithms import KLConfig
from penstock_learner.checkpoints.trainer_state import Ledger, Lineage, Rewind, RewindCause, TrainerState

_MAX_CORRECTION = 0.2


@dataclass(frozen=True)
class KLController:
    """The KL coefficient, which a checkpoint stores, and how it changes. An adaptive one follows `coefficient *= 1 +
    clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon`."""

    config: KLConfig
    coefficient: float

    def updated(self, measured_kl: float, num_sequences: int) -> KLController:
        """The controller after a step over `num_sequences` sequences whose mean KL per token was `measured_kl`. A KL
        that is not finite is ignored: its step was skipped."""
        if self.config.controller == "fixed" or not math.isfinite(measured_kl):
            return self
        error = min(max(measured_kl / self.config.target - 1, -_MAX_CORRECTION), _MAX_CORRECTION)
        return replace(self, coefficient=self.coefficient * (1 + error * num_sequences / self.config.horizon))


def make_kl_controller(config: KLConfig, coefficient: float | None = None) -> KLController:
    """The controller of a run. `coefficient` is the value from which an adaptive one resumes."""
    resumes = config.controller != "fixed" and coefficient is not None
    return KLController(config, coefficient if resumes and coefficient is not None else config.coefficient)


@dataclass
class Term:
    """The state of training that no role holds. A checkpoint stores it as a `TrainerState`."""

    number: int = 0
    store_id: str = ""
    """Identifies the queue whose prompt ids the ledger holds."""
    step: int = 0
    """The last step that was trained."""
    policy_version: int = 0
    """The version of the weights that the policy's ranks hold."""
    ledger: Ledger = field(default_factory=Ledger)
    kl: KLController = field(default_factory=lambda: KLController(KLConfig(), 0.0))
    resumed_from: str = ""
    """The value of `checkpoint.resume` if the run was started from the checkpoint that it names, or empty."""
    num_orders: int = 0
    """How many of the operator's orders to rewind were handled, including orders that could not be followed."""
    lineage: Lineage = field(default_factory=Lineage)
    is_rewound: bool = False
    """Whether the term starts from a checkpoint that the run was rewound to. Newer versions are abandoned then."""
    manifests: dict[int, list[int]] = field(default_factory=dict)
    """Prompt ids that an earlier learner had taken for steps that no checkpoint covers, by step."""
    num_overdue: int = 0
    """Groups that waited when the term began and cannot all be trained within `replay.max_staleness`."""
    uncommitted: list[int] = field(default_factory=list)
    """Prompts that were trained since the last checkpoint."""

    def take_manifest(self, step: int) -> list[int]:
        """The prompts that an earlier learner had taken for the step. They are returned once."""
        return self.manifests.pop(step, [])

    def add_trained(self, step: int, prompt_ids: Sequence[int], kl_reference: float, num_sequences: int) -> None:
        """Count a batch as trained. The last two arguments are numbers of its step."""
        self.step = step
        self.kl = self.kl.updated(kl_reference, num_sequences)
        self.ledger.add(prompt_ids)
        self.uncommitted += prompt_ids

    def mark_durable(self, prompt_ids: Sequence[int]) -> None:
        """A durable checkpoint covers these prompts: their groups may be acknowledged."""
        self.ledger.mark_durable(prompt_ids)

    def take_uncommitted(self) -> list[int]:
        """The prompts that the next checkpoint covers and none before it."""
        taken, self.uncommitted = self.uncommitted, []
        return taken

    def advance(self, version: int) -> None:
        """The policy's ranks hold weights that are called `version` now."""
        self.policy_version = version

    def handle_orders(self, num_orders: int) -> None:
        """So many of the operator's orders to rewind are handled. Each is handled once."""
        self.num_orders = num_orders

    def rewind(self, from_version: int, to_version: int, why: RewindCause = "order") -> None:
        """The policy's ranks hold the weights of `from_version`, which are called `to_version` now."""
        self.lineage.add(Rewind(from_version, to_version, why))
        self.policy_version = to_version

    def trainer_state(self, feed_positions: dict[str, int]) -> TrainerState:
        return TrainerState(
            self.step,
            self.policy_version,
            self.number,
            self.ledger.ranges,
            self.kl.coefficient,
            feed_positions=feed_positions,
            store_id=self.store_id,
            resumed_from=self.resumed_from,
            num_orders=self.num_orders,
            lineage=self.lineage.rewinds,
        )
