"""Where the numbers of a finished step go: the loggers, Prometheus, the traces and the process log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import LearnerConfig
from penstock.tracing import Tracing
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loop.batches import Batch
from penstock_learner.loop.roll_back import oldest_version
from penstock_learner.loop.step_metrics import mean_rewards
from penstock_learner.loop.term import Term
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.model.utilisation import RankUsage, mfu, peak_flops
from penstock_learner.roles.role_group import RoleGroup

logger = logging.getLogger(__name__)
USAGE_EVERY_S = 5.0
"""How often the ranks are asked for their memory. Each time is a call between two steps."""


class StepRecords:
    """Records every step of a learner process, through all its terms."""

    def __init__(
        self, config: LearnerConfig, policy: RoleGroup, metrics: LearnerMetrics, tracing: Tracing,
        silence_s: float | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.policy = policy
        self.metrics = metrics
        self.tracing = tracing
        self.recovering_since = None if silence_s is None else time.monotonic() - silence_s
        """When the learner that crashed before this one was last alive. None after the first step."""
        self.usage: list[RankUsage] = []
        self.usage_at = -USAGE_EVERY_S

    def trace(self, batch: Batch, started_s: float, term: Term) -> None:
        """Record for each traced group how long it waited for its step, and the step."""
        ended_s = time.time()
        for group in batch.groups if batch.trace_parents else ():
            self.tracing.record("queue", group.trace_parent, group.finished_at_ms / 1000, started_s)
            staleness = max(0, term.policy_version - oldest_version(group, term.roll_backs))
            fields = {"step": batch.step, "policy_version": term.policy_version, "staleness": staleness}
            self.tracing.record("train", group.trace_parent, started_s, ended_s, **fields)

    async def record(
        self, batch: Batch, metrics: Mapping[str, float], rewards: NDArray[np.float32], term: Term, loggers: StepLoggers
    ) -> None:
        """Record one step. `rewards` are those that the batch was trained with, one per trajectory."""
        loggers.log(metrics)
        self.metrics.record_step(metrics, mean_rewards(batch.groups, rewards))
        if self.recovering_since is not None:
            self.metrics.recovery_seconds.labels("learner").observe(time.monotonic() - self.recovering_since)
            self.recovering_since = None
        trained_version = metrics["policy_version"] - 1
        oldest = [oldest_version(group, term.roll_backs) for group in batch.groups]
        self.metrics.staleness.observe_all([max(0.0, trained_version - version) for version in oldest])
        logger.info(
            "step %d version %d reward %.3f staleness %.2f loss %.4f %.2fs",
            metrics["step"], metrics["policy_version"], metrics["reward_mean"], metrics["staleness_mean"],
            metrics["loss"], metrics["step_s"],
        )  # fmt: skip
        await self._observe_usage(metrics)

    async def _observe_usage(self, metrics: Mapping[str, float]) -> None:
        """Memory of the policy's ranks, and how much of their FLOPs the update used."""
        if time.monotonic() - self.usage_at >= USAGE_EVERY_S:
            self.usage = await self.policy.call_all("usage")
            self.usage_at = time.monotonic()
        for rank, usage in enumerate(self.usage):
            self.metrics.memory_peak.labels(rank).set(usage.memory_peak_bytes)
        peak = sum(peak_flops(usage.device_name, self.config.peak_flops_per_rank) for usage in self.usage)
        num_tokens = (metrics["prompt_tokens"] + metrics["response_tokens"]) * self.config.epochs_per_step
        num_tokens -= metrics["shared_tokens"]
        self.metrics.mfu.set(mfu(self.usage[0].num_parameters, num_tokens, metrics["update_s"], peak))
