"""Runs the step's program on one batch after another, and makes sure that what it returns is a trained step.

The program is our own or a user's (steps/program.py). It may call the roles in any way.
A step counts as trained only if every call that it made has ended and none has failed. Otherwise the controller
rewinds to a checkpoint, or the learner ends, and the batch is trained again from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import LearnerConfig
from penstock.trajectory import Group
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.checkpoints.trainer_state import Lineage
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup, RoleRecovery
from penstock_learner.steps.context import AheadBatch, BatchContext, StepContext
from penstock_learner.steps.program import load_program
from penstock_learner.steps.roles import Calls, RoleAccess, Roles
from penstock_learner.steps.stages import proximal_log_probs
from penstock_learner.steps.step_result import (
    SkippedSteps,
    StepResult,
    batch_metrics,
    metrics_of_updates,
    ratio_counts,
    reward_part_means,
    sample_metrics,
)


class TrainingStep:
    """Trains the roles on one batch after another. Knows nothing of queues, checkpoints or publication."""

    def __init__(
        self, config: LearnerConfig, roles: Mapping[str, RoleGroup], trained: Sequence[str], recovery: RoleRecovery,
        metrics: LearnerMetrics, skipped: SkippedSteps, prefix_sharing: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.config = config
        self.roles = roles
        self.access = RoleAccess(config, recovery, frozenset(trained), prefix_sharing)
        self.program = load_program(config)
        self.metrics = metrics
        self.skipped = skipped

    async def ahead(self, groups: Sequence[Group]) -> SequenceBatch:
        """The batch of the groups, with what frozen roles compute. It may run while earlier steps train."""
        batch = self._batch_of(groups)
        roles = Roles(self.roles, self.access, with_trained=False)
        batch = await self.program.run_ahead(batch, roles, BatchContext(self.config, groups))
        roles.calls.raise_if_unfinished(self.program.ahead_name)
        return batch

    async def policy_log_probs(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """[T] log-probs of the groups' response tokens under the policy's weights, in order."""
        log_probs: NDArray[np.float32] = await Roles(self.roles, self.access).policy.log_probs(batch_of(groups))
        return log_probs

    async def reward_model_scores(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """[S] the reward model's scores of all samples. It may run while a step trains."""
        batch = batch_of(groups, with_experts=False)
        scores: NDArray[np.float32] = await Roles(self.roles, self.access, with_trained=False).reward_model.scores(
            batch
        )
        return scores

    async def run(
        self,
        groups: Sequence[Group],
        step: int,
        version: int,
        kl_coefficient: float,
        ahead: Awaitable[SequenceBatch] | None = None,
        lineage: Lineage | None = None,
    ) -> StepResult:
        """Train on the groups. The policy then holds new weights, not yet published.

        `ahead` is an earlier call to `ahead` for these groups."""
        started = time.monotonic()
        computing = asyncio.ensure_future(ahead or self.ahead(groups))
        context = StepContext(self.config, groups, step, version, kl_coefficient, AheadBatch(computing))
        roles = Roles(self.roles, self.access)
        batch = self._batch_of(groups)
        batch, own = await self.program.run_step(batch, roles, context)
        roles.calls.raise_if_unfinished(self.program.step_name)
        await computing  # its error counts, even if the step caught it
        ended = time.monotonic()
        self._observe(roles.calls, step)
        update_started = roles.calls.update_started or ended
        numbers = {
            **own,
            "step": float(step),
            **batch_metrics(batch, version, lineage),
            **sample_metrics(groups),
            **reward_part_means(groups),
            **metrics_of_updates(roles.calls.updates, batch, self.config.algorithm, kl_coefficient),
            "forward_s": update_started - started,
            "update_s": ended - update_started,
            "time": time.time(),
        }
        return StepResult(step, numbers, batch.rewards, proximal_log_probs(batch, roles.calls.updates))

    def _batch_of(self, groups: Sequence[Group]) -> SequenceBatch:
        keys = self.config.algorithm.advantage.reward_keys
        return batch_of(groups, with_experts=self.config.router.replay, reward_keys=keys)

    def _observe(self, calls: Calls, step: int) -> None:
        """Count the step's updates. Raises TrainingDiverged if too many in a row were skipped."""
        for update in calls.updates:
            self.skipped.check(update.role, step, update.batch, update.shards, update.reports)
        for update in calls.updates:
            if update.role == "policy" and not update.reports[0].step.skipped:  # the counter would stay NaN forever
                self.metrics.importance_ratio.add(*ratio_counts(update.reports))
