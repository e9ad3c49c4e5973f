"""Prometheus metrics of the learner. Names and labels are those of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock import __version__
from penstock.metrics import LONG_SECONDS, PREFIX, CountedHistogram, DiskGauges, HostMemoryGauges
from penstock_learner.algorithms.corrections import RATIO_EDGES
from penstock_learner.weights.push import PushReport

REWARD_PART, MAX_REWARD_PARTS = "reward_part/", 16
"""Prefix of the means of reward parts among the numbers of a step, and how many parts are recorded."""
ROLES = ("policy", "reference", "critic", "reward_model")
PHASES = ("wait", "forward", "update", "gather")
MAX_SERVERS = 256
"""Servers that have their own series."""
OTHER_SERVERS = "other"
"""Label of groups from imports, from sessions, and from servers that have left."""
_ALGORITHM_GAUGES = {
    "entropy": ("algo_entropy_nats", "Mean entropy of the sampled distribution."),
    "grad_norm": ("algo_grad_norm", "Gradient norm before clipping."),
    "is_truncated_ratio": ("algo_is_truncated_ratio", "Share of tokens whose importance weight was truncated."),
    "is_rejected_ratio": ("algo_is_rejected_ratio", "Share of tokens that were rejected or lie outside the band."),
    "effective_sample_ratio": ("algo_effective_sample_ratio", "(sum w)^2 / (n sum w^2) of the importance weights."),
    "reward_min": ("reward_min", "Lowest reward in the last batch."),
    "reward_max": ("reward_max", "Highest reward in the last batch."),
    "reward_std": ("reward_std", "Standard deviation of the rewards in the last batch."),
    "zero_advantage_group_ratio": ("algo_zero_advantage_group_ratio", "Share of groups without reward spread."),
    "reward_failed_ratio": ("reward_failed_ratio", "Share of the step's samples whose reward failed."),
    "overhead_ratio": (
        "learner_overhead_ratio",
        "Share of the last step outside forward, backward and optimizer, without waiting for groups.",
    ),
    "idle_ratio": (
        "learner_idle_ratio",
        "Share of the last step outside forward, backward and optimizer, with waiting for groups.",
    ),
    "truncated_ratio": ("train_truncated_ratio", "Share of the step's responses that were cut at a limit."),
    "critic_grad_norm": ("algo_critic_grad_norm", "Gradient norm of the critic before clipping."),
    "critic_clip_ratio": ("algo_critic_clip_ratio", "Share of tokens whose value was clipped."),
    "value_explained_variance": ("algo_value_explained_variance", "1 - var(returns - values) / var(returns)."),
    "singleton_group_ratio": ("algo_singleton_group_ratio", "Share of groups with one sample, which have no baseline."),
    "logprob_mismatch": (
        "algo_logprob_mismatch_nats",
        "Mean |learner - engine| difference of log-probs for the same version.",
    ),
    "router_aux_loss": ("algo_router_aux_loss", "Auxiliary loss of the routers, before its coefficient."),
    "expert_load_max": ("algo_expert_load_max_ratio", "Load of the busiest expert over the mean of its layer."),
    "unused_expert_ratio": ("algo_unused_expert_ratio", "Share of experts that no token of the step chose."),
    "router_replayed_ratio": ("algo_router_replayed_ratio", "Share of expert choices that were the engine's."),
}


class LearnerMetrics:
    """All metrics of the learner controller, on their own registry. Known label values start at 0."""

    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        def name(suffix: str) -> str:
            return f"{PREFIX}_{suffix}"

        self.registry = registry
        info = Gauge(name("build_info"), "Always 1.", ["placement", "version"], registry=registry)
        info.labels(placement, __version__).set(1)
        self.steps = Counter(name("learner_steps"), "Optimizer steps.", registry=registry)
        self.step_seconds = Histogram(
            name("learner_step_duration_seconds"), "One step.", registry=registry, buckets=LONG_SECONDS
        )
        self.phase_seconds = Counter(name("learner_phase_seconds"), "Time by phase.", ["phase"], registry=registry)
        self.compute_seconds = Counter(
            name("learner_compute_seconds"), "Time of forward, backward and optimizer on the policy's ranks.",
            registry=registry,
        )  # fmt: skip
        self.tokens = Counter(name("learner_tokens"), "Tokens of trained groups.", ["kind"], registry=registry)
        self.mfu = Gauge(name("learner_mfu_ratio"), "Model FLOPs over the devices' peak FLOPs.", registry=registry)
        self.memory_peak = Gauge(
            name("learner_memory_peak_bytes"), "Peak memory of a policy rank.", ["rank"], registry=registry
        )
        self.last_step = Gauge(
            name("learner_last_step_timestamp_seconds"), "When the last step ended.", registry=registry
        )
        self.version = Gauge(name("policy_version"), "Policy version.", ["component"], registry=registry)
        self.staleness = CountedHistogram(
            name("trajectory_staleness_versions"), "Versions between sampling and training, by group.",
            (0, 1, 2, 3, 4, 6, 8, 12, 16, 32), registry,
        )  # fmt: skip
        self.reward = Gauge(name("reward_mean"), "Mean reward in the last batch.", ["env"], registry=registry)
        self.reward_part = Gauge(
            name("reward_part_mean"), "Mean of a part of the reward in the last batch.", ["part"], registry=registry
        )
        self.reward_parts: set[str] = set()
        """Parts that have a series. Their number is limited, because a reward function chooses the names."""
        self.skipped = Counter(
            name("learner_nonfinite_steps"), "Steps skipped for a non-finite loss or gradient.", registry=registry
        )
        self.role_restarts = Counter(
            name("learner_role_restarts"), "Restarts of a role after a rank died or hung.", ["role"], registry=registry
        )
        self.quarantines = Counter(
            name("learner_quarantines"), "Servers put into quarantine because their log-probs disagreed.",
            registry=registry,
        )  # fmt: skip
        self._declare_algorithm(registry, name("algo"))
        self._declare_weights(registry, name("weight"))
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.checkpoint_success = Gauge(
            name("checkpoint_last_success_timestamp_seconds"), "Last durable checkpoint.", registry=registry
        )
        self.checkpoint_seconds = Histogram(
            name("checkpoint_duration_seconds"), "One checkpoint.", registry=registry, buckets=LONG_SECONDS
        )
        self.recovery_seconds = Histogram(
            name("recovery_duration_seconds"), "From the last sign of life before a crash to the next step.",
            ["component"], registry=registry, buckets=LONG_SECONDS,
        )  # fmt: skip
        for phase in PHASES:
            self.phase_seconds.labels(phase)
        for kind in ("prompt", "response"):
            self.tokens.labels(kind)
        for role in ROLES:
            self.role_restarts.labels(role)
        self.recovery_seconds.labels("learner")

    def _declare_algorithm(self, registry: CollectorRegistry, prefix: str) -> None:
        self.loss = Gauge(f"{prefix}_loss", "Loss by term.", ["term"], registry=registry)
        self.kl = Gauge(f"{prefix}_kl_nats", "Mean KL per token.", ["against"], registry=registry)
        self.clip = Gauge(f"{prefix}_clip_ratio", "Share of clipped tokens.", ["side"], registry=registry)
        self.importance_ratio = CountedHistogram(
            f"{prefix}_importance_ratio", "Ratio of policy to behaviour policy at trained tokens.", RATIO_EDGES,
            registry,
        )  # fmt: skip
        self.algorithm = {
            key: Gauge(f"{PREFIX}_{suffix}", text, registry=registry)
            for key, (suffix, text) in _ALGORITHM_GAUGES.items()
        }

        self.server_mismatch = Gauge(
            f"{prefix}_server_logprob_mismatch_nats", "Mean |learner - engine| difference of log-probs, by server.",
            ["server"], registry=registry,
        )  # fmt: skip
        self.server_limit = Gauge(
            f"{prefix}_server_logprob_limit_nats", "Difference beyond which a server disagrees.", ["server"],
            registry=registry,
        )  # fmt: skip
        self._compared_servers: set[str] = set()

    def record_agreement(self, found: Mapping[str, tuple[float, float]], fleet: Collection[str]) -> None:
        """Record the difference of each server and its limit, in nats. Servers outside the fleet share one series, and
        a server's series end when it leaves, so there are never many."""
        for name, (mismatch_nats, limit_nats) in found.items():
            label = name if name in fleet else OTHER_SERVERS
            if label in self._compared_servers or len(self._compared_servers) < MAX_SERVERS:
                self._compared_servers.add(label)
                self.server_mismatch.labels(label).set(mismatch_nats)
                self.server_limit.labels(label).set(limit_nats)
        for label in self._compared_servers - set(fleet) - {OTHER_SERVERS}:
            self._compared_servers.remove(label)
            self.server_mismatch.remove(label)
            self.server_limit.remove(label)

    def _declare_weights(self, registry: CollectorRegistry, prefix: str) -> None:
        self.sync_seconds = Histogram(
            f"{prefix}_sync_duration_seconds", "Weight push by phase.", ["transport", "phase"], registry=registry,
            buckets=LONG_SECONDS,
        )  # fmt: skip
        self.sync_bytes = Counter(f"{prefix}_sync_bytes", "Bytes of committed pushes.", registry=registry)
        self.syncs = Counter(f"{prefix}_syncs", "Pushes, by member and result.", ["result"], registry=registry)
        self.sync_success = Gauge(
            f"{prefix}_sync_last_success_timestamp_seconds", "Last push with a committed member.", registry=registry
        )
        for result in ("committed", "failed", "superseded", "nonfinite"):
            self.syncs.labels(result)

    def record_step(self, metrics: Mapping[str, float], rewards: Mapping[str, float]) -> None:
        """Record one step. `rewards` is the batch's mean reward by data source."""
        self.steps.inc()
        self.step_seconds.observe(metrics["step_s"])
        for phase in PHASES:
            self.phase_seconds.labels(phase).inc(metrics[f"{phase}_s"])
        self.compute_seconds.inc(metrics["compute_s"])
        for kind in ("prompt", "response"):
            self.tokens.labels(kind).inc(metrics[f"{kind}_tokens"])
        self.last_step.set_to_current_time()
        for data_source, reward in rewards.items():
            self.reward.labels(data_source or "default").set(reward)
        for key in (key for key in metrics if key.startswith(REWARD_PART)):
            part = key.removeprefix(REWARD_PART)
            if part in self.reward_parts or len(self.reward_parts) < MAX_REWARD_PARTS:
                self.reward_parts.add(part)
                self.reward_part.labels(part).set(metrics[key])
        self.loss.labels("policy").set(metrics["loss"])
        self.loss.labels("kl").set(metrics["kl_loss"])
        self.kl.labels("reference").set(metrics["kl_reference"])
        self.kl.labels("behaviour").set(metrics["kl_behaviour"])
        self.clip.labels("low").set(metrics["clip_ratio_low"])
        self.clip.labels("high").set(metrics["clip_ratio_high"])
        self.skipped.inc(max(metrics["skipped"], metrics.get("critic_skipped", 0.0)))
        if "critic_loss" in metrics:
            self.loss.labels("value").set(metrics["critic_loss"])
        for key, gauge in self.algorithm.items():
            if key in metrics:
                gauge.set(metrics[key])

    def record_push(self, report: PushReport) -> None:
        """Record one push. Members that were superseded are counted elsewhere, once per version."""
        for phase, seconds in report.seconds.items():
            self.sync_seconds.labels(report.transport, phase).observe(seconds)
        self.sync_bytes.inc(report.num_bytes)
        self.syncs.labels("committed").inc(len(report.committed))
        self.syncs.labels("failed").inc(len(report.failed))
        if report.committed:
            self.sync_success.set_to_current_time()
