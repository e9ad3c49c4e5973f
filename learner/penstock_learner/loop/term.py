"""A term: the time during which one learner, and no other, trains a run. It starts from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config.run import RunConfig
from penstock.replay.contract import GroupConsumer
from penstock_learner.algorithms.kl import KLController, make_kl_controller
from penstock_learner.checkpoints.checkpoint import TrainerState
from penstock_learner.checkpoints.ledger import Ledger
from penstock_learner.loop.batches import Batch
from penstock_learner.loop.roll_back import RollBack
from penstock_learner.loop.take_over import TakeOver, restore_batches

MAX_ROLL_BACKS = 64
"""Roll backs that a term remembers and its checkpoints store. A restart adds one too. Groups that were sampled before
the oldest of them count as older than they are."""


@dataclass
class Term:
    """The state of training that no role holds. A checkpoint stores it as a `TrainerState`."""

    number: int
    store_id: str
    """Identifies the queue whose prompt ids the ledger holds."""
    step: int
    """The last step that was trained."""
    policy_version: int
    """The version of the weights that the policy's ranks hold."""
    ledger: Ledger
    kl: KLController
    resumed_from: str
    """The value of `checkpoint.resume` if the run was started from the checkpoint that it names, or empty."""
    num_roll_backs: int
    """How many of the operator's roll back orders were handled, including those that could not be followed."""
    roll_backs: list[RollBack]
    """The newest MAX_ROLL_BACKS, oldest first. Readers of batches share the list."""
    has_gone_back: bool
    """Whether the term starts from a checkpoint that the run went back to. Newer versions are given up then."""
    manifests: dict[int, list[int]]
    """Prompt ids that an earlier learner had taken for steps that no checkpoint covers, by step."""
    uncommitted: list[int] = field(default_factory=list)
    """Prompts that were trained since the last checkpoint."""

    def add_trained(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Count the batch as trained. `metrics` are the numbers of its step."""
        self.step = batch.step
        self.kl = self.kl.updated(metrics["kl_reference"], int(metrics["num_sequences"]))
        self.ledger.add(batch.prompt_ids)
        self.uncommitted += batch.prompt_ids

    def add_roll_back(self, roll_back: RollBack) -> None:
        self.roll_backs.append(roll_back)
        del self.roll_backs[:-MAX_ROLL_BACKS]

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
            num_roll_backs=self.num_roll_backs,
            roll_backs=[(each.policy_version, each.new_version, each.is_restart) for each in self.roll_backs],
        )


async def begin_term(config: RunConfig, queue: GroupConsumer, taken: TakeOver) -> Term:
    """Restore the queue to the state that was taken over. The roles hold the weights of its checkpoint."""
    state = taken.state
    return Term(
        number=taken.term,
        store_id=taken.store_id,
        step=state.step,
        policy_version=state.policy_version,
        ledger=state.make_ledger(),
        kl=make_kl_controller(config.learner.algorithm.kl, state.kl_coefficient),
        resumed_from=state.resumed_from,
        num_roll_backs=state.num_roll_backs,
        roll_backs=[RollBack(*versions) for versions in state.roll_backs[-MAX_ROLL_BACKS:]],
        has_gone_back=taken.has_gone_back,
        manifests=await restore_batches(queue, state),
    )
