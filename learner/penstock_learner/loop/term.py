"""A term: the time during which one learner, and no other, trains a run. It starts from a checkpoint. The term owns the
ledger, the manifests and the lineage, and is the only one that changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config.algorithms import KLConfig
from penstock_learner.algorithms.kl import KLController
from penstock_learner.checkpoints.trainer_state import Ledger, Lineage, Rewind, RewindCause, TrainerState


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
    """How many of the operator's orders to rewind were handled, including those that could not be followed."""
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

    def rewind(self, target: int, version: int, why: RewindCause = "order") -> None:
        """The policy's ranks hold the weights of version `target`, which are called `version` now."""
        self.lineage.add(Rewind(target, version, why))
        self.policy_version = version

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
