"""One batch through the roles: rewards, log-probs and values, advantages, updates.

    reward model scores ┐
    reference log-probs │                 ┌► critic update
    proximal log-probs  ├─► advantages ─► ┤
    critic values       ┘                 └► policy update

The entries of a column run at the same time, and the first two may run a step ahead (batch_ahead.py). A policy with an
adapter is its own reference: it computes the reference's log-probs in the step. A role that only computes forward
passes is restarted here when it dies, and its call is repeated. The death of a trained role is left to the controller,
which must go back to a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import LearnerConfig, RewardModelConfig
from penstock.errors import RoleDied
from penstock.trajectory import Group
from penstock_learner.algorithms.aggregation import Denominators
from penstock_learner.loop.advantage_step import denominators_of, with_advantages
from penstock_learner.loop.roll_back import RollBack
from penstock_learner.loop.skipped_steps import SkippedSteps, listed
from penstock_learner.loop.step_metrics import (
    batch_metrics,
    critic_metrics,
    ratio_counts,
    reward_part_means,
    sample_metrics,
    update_metrics,
)
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.model.packing import RankShard, SequenceBatch, batch_of, partition, unpermute, unpermute_sequences
from penstock_learner.roles.role_group import RoleGroup, gather_all
from penstock_learner.roles.role_recovery import RoleRecovery

logger = logging.getLogger(__name__)
TRAINED_ROLES = ("policy", "critic")
ForwardOutputs = dict[str, NDArray[np.float32]]
"""Fields of a `SequenceBatch` that forward passes compute, by name."""


@dataclass(frozen=True)
class _Update:
    """One optimizer step of a role."""

    batch: SequenceBatch
    shards: list[RankShard]
    denominators: Denominators
    reports: list[Any]
    """One report for each shard."""


class TrainingStep:
    """Trains the roles on one batch after another. Knows nothing of queues, checkpoints or publication."""

    def __init__(
        self, config: LearnerConfig, roles: Mapping[str, RoleGroup], recovery: RoleRecovery, metrics: LearnerMetrics,
        skipped: SkippedSteps,
    ) -> None:  # fmt: skip
        self.config = config
        self.roles = roles
        self.recovery = recovery
        self.metrics = metrics
        self.skipped = skipped
        self.recomputed: NDArray[np.float32] | None = None
        """[T] the policy's log-probs of the last batch before its update, if they were computed."""
        self.rewards: NDArray[np.float32] = np.zeros(0, np.float32)
        """[S] rewards that the last batch was trained with, including the reward model's."""
        self._one_batch = asyncio.Lock()

    async def frozen_forwards(self, groups: Sequence[Group]) -> ForwardOutputs:
        """The forward passes of the frozen roles. They run at the same time, and may run while earlier steps train.

        One batch is computed at a time, so that only one caller restarts a role that dies."""
        batch = batch_of(groups, with_experts=False)
        async with self._one_batch:
            calls: dict[str, Awaitable[NDArray[np.float32]]] = {}
            if self.config.reward_model is not None:
                calls["rewards"] = self._rewards(batch, groups, self.config.reward_model)
            if "reference" in self.roles:
                calls["reference_log_probs"] = self._per_token("reference", "log_probs", batch)
            return dict(zip(calls, await gather_all(*calls.values()), strict=True))

    async def policy_log_probs(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """[T] log-probs of the groups' response tokens under the policy's weights, in order."""
        return await self._per_token("policy", "log_probs", batch_of(groups))

    async def run(
        self,
        groups: Sequence[Group],
        step: int,
        version: int,
        kl_coefficient: float,
        frozen: Awaitable[ForwardOutputs] | None = None,
        roll_backs: Sequence[RollBack] = (),
    ) -> dict[str, float]:
        """Train on the groups and return the step's numbers. The policy then holds new weights, not yet published.

        `frozen` is an earlier call to `frozen_forwards` for these groups."""
        started = time.monotonic()
        batch = batch_of(groups, with_experts=self.config.router.replay)
        batch = await self._with_forwards(batch, frozen or self.frozen_forwards(groups))
        self.recomputed, self.rewards = batch.old_log_probs, batch.rewards
        metrics = {"step": float(step)} | batch_metrics(batch, version, roll_backs)
        metrics |= sample_metrics(groups) | reward_part_means(groups)
        if not self.config.algorithm.advantage.has_baseline:
            batch = batch.without_baselines()
        batch = with_advantages(batch, self.config.algorithm, kl_coefficient).without_baselines()
        update_started = time.monotonic()
        metrics |= await self._update(batch, step, version, kl_coefficient)
        return metrics | {
            "forward_s": update_started - started,
            "update_s": time.monotonic() - update_started,
            "time": time.time(),
        }

    async def _with_forwards(self, batch: SequenceBatch, frozen: Awaitable[ForwardOutputs]) -> SequenceBatch:
        """The batch with all forward passes that advantages and losses need. They run at the same time."""
        correction = self.config.algorithm.correction
        calls: dict[str, Awaitable[NDArray[np.float32]]] = {}
        if correction.mode != "bypass" and correction.proximal == "recomputed":
            calls["old_log_probs"] = self._per_token("policy", "log_probs", batch)
        if self.config.policy_is_reference:
            calls["reference_log_probs"] = self._per_token("policy", "reference_log_probs", batch)
        if "critic" in self.roles:
            calls["values"] = self._per_token("critic", "values", batch)
        of_frozen, *of_trained = await gather_all(frozen, *calls.values())
        computed: dict[str, Any] = of_frozen | dict(zip(calls, of_trained, strict=True))
        return replace(batch, **computed)

    async def _rewards(
        self, batch: SequenceBatch, groups: Sequence[Group], config: RewardModelConfig
    ) -> NDArray[np.float32]:
        """[S] the batch's rewards, combined with the reward model's for the data sources that it scores."""
        sources = [group.data_source for group in groups for _ in group.trajectories]
        patterns = config.data_sources or ("*",)
        scored = [i for i, source in enumerate(sources) if any(fnmatchcase(source, pattern) for pattern in patterns)]
        rewards = batch.rewards.copy()
        if scored:
            part = batch.select(scored)
            scores = unpermute_sequences(*await self._forward("reward_model", "scores", part), part)
            kept = rewards[scored] if config.combine == "add" else 0
            rewards[scored] = kept + config.coefficient * scores
            if bad := sorted({int(batch.group_ids[i]) for i in scored if not np.isfinite(rewards[i])}):
                logger.error(
                    "the reward model's scores of prompts %s are not finite, so the step will be skipped; check "
                    "learner.reward_model.path", listed(bad),
                )  # fmt: skip
        return rewards

    async def _per_token(self, role: str, method: str, batch: SequenceBatch) -> NDArray[np.float32]:
        return unpermute(*await self._forward(role, method, batch), batch)

    async def _forward(
        self, role: str, method: str, batch: SequenceBatch
    ) -> tuple[list[NDArray[np.float32]], list[RankShard]]:
        """The result for each shard, and the shards."""
        group = self.roles[role]
        shards, num_sharing = self._partition(role, self._for_role(role, batch))
        while True:
            try:
                parts = await group.call_each(method, [(shard,) for shard in shards for _ in range(num_sharing)])
                return parts[::num_sharing], shards
            except RoleDied as error:
                if role in TRAINED_ROLES:
                    raise
                await self.recovery.restart(group, error)

    async def _update(self, batch: SequenceBatch, step: int, version: int, kl_coefficient: float) -> dict[str, float]:
        """Update policy and critic at the same time, each with one mini-batch after another."""
        algorithm = self.config.algorithm
        parts = batch.split(self.config.minibatches_per_step) * self.config.epochs_per_step
        learning = [self._learn("policy", parts, algorithm.loss.constant_length, step, version, kl_coefficient)]
        if "critic" in self.roles:
            learning.append(self._learn("critic", parts, algorithm.value_loss.constant_length, step))
        policy, *critic = await gather_all(*learning)
        for role, updates in zip(TRAINED_ROLES, (policy, *critic), strict=False):
            for update in updates:
                self.skipped.check(role, step, update.batch, update.shards, update.reports)
        for update in policy:
            if not update.reports[0].step.skipped:  # the counter would stay NaN for ever
                self.metrics.importance_ratio.add(*ratio_counts(update.reports))
        metrics = update_metrics([update.reports for update in policy], _num_tokens(policy))
        metrics["kl_coefficient"] = kl_coefficient
        metrics["kl_loss"] = kl_coefficient * metrics["kl_reference"] if algorithm.kl.placement == "loss" else 0.0
        if critic:
            metrics |= critic_metrics([update.reports for update in critic[0]], batch, _num_tokens(critic[0]))
        return metrics

    async def _learn(
        self, role: str, parts: Sequence[SequenceBatch], constant_length: int | None, *arguments: Any
    ) -> list[_Update]:
        updates = []
        for part in parts:
            shards, num_sharing = self._partition(role, self._for_role(role, part))
            denominators = replace(denominators_of(part, self.config.algorithm), constant_length=constant_length)
            calls = [(shard, denominators, *arguments) for shard in shards for _ in range(num_sharing)]
            reports = (await self.roles[role].call_each("update", calls))[::num_sharing]
            updates.append(_Update(part, shards, denominators, reports))
        return updates

    def _for_role(self, role: str, batch: SequenceBatch) -> SequenceBatch:
        """The batch without what the role does not read. Only the policy replays the engine's choice of experts."""
        return batch if role == "policy" else replace(batch, routed_experts=None)

    def _partition(self, role: str, batch: SequenceBatch) -> tuple[list[RankShard], int]:
        """The shards of a batch, and how many ranks share each of them under sequence parallelism."""
        num_sharing = self.config.sequence_parallel if role == "policy" else 1
        num_shards = self.roles[role].num_ranks // num_sharing
        return partition(batch, num_shards, self.config.micro_batch_tokens * num_sharing), num_sharing


def _num_tokens(updates: Sequence[_Update]) -> int:
    """Trained tokens of all updates together."""
    return sum(update.denominators.num_tokens for update in updates)
