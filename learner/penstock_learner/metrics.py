"""Prometheus metrics of the learner. docs/metrics.md is made from these declarations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock import __version__
from penstock.metrics import LONG_SECONDS, PREFIX, CountedHistogram, DiskGauges, HostMemoryGauges
from penstock_learner.algorithms import RATIO_EDGES

if TYPE_CHECKING:
    from penstock_learner.weights.senders import PushReport

REWARD_PART, MAX_REWARD_PARTS = "reward_part/", 16
"""Prefix of the means of reward parts among the numbers of a step, and how many parts are recorded."""
ROLES = ("policy", "reference", "critic", "reward_model")
PHASES = ("wait", "compare", "forward", "update", "gather")
THROUGHPUTS = ("generation", "log_probs", *ROLES[1:], "update")
"""Phases with a `…_tokens_per_second` among the numbers of a step."""
MAX_SERVERS = 256
"""Servers that have their own series."""
OTHER_SERVERS = "other"
"""Label of groups from imports, from sessions, and from servers that have left."""
_ALGORITHM_GAUGES = {
    "step": ("learner_step", "Newest step of the run."),
    "lr": ("learner_lr", "Learning rate of the policy."),
    "entropy": ("algo_entropy_nats", "Mean entropy over trained tokens."),
    "grad_norm": ("algo_grad_norm", "Gradient norm before clipping."),
    "is_truncated_ratio": ("algo_is_truncated_ratio", "Share of tokens with an importance weight cut to the cap."),
    "is_rejected_ratio": ("algo_is_rejected_ratio", "Share of tokens that were rejected or lie outside the band."),
    "effective_sample_ratio": ("algo_effective_sample_ratio", "`(sum w)^2 / (n sum w^2)` of importance weights."),
    "reward_min": ("reward_min", "Lowest reward of a sample in the last batch."),
    "reward_max": ("reward_max", "Highest reward of a sample in the last batch."),
    "reward_std": ("reward_std", "Standard deviation of the rewards in the last batch."),
    "zero_advantage_group_ratio": ("algo_zero_advantage_group_ratio", "Share of groups with equal rewards."),
    "reward_failed_ratio": ("reward_failed_ratio", "Share of the step's samples whose reward failed."),
    "overhead_ratio": (
        "learner_overhead_ratio",
        "Share of the last step outside forward, backward and optimizer, without waiting for groups.",
    ),
    "idle_ratio": (
        "learner_idle_ratio",
        "Share of the last step outside forward, backward and optimizer, with waiting for groups.",
    ),
    "truncated_ratio": ("train_truncated_ratio", "Share of the step's responses cut at a limit on tokens or turns."),
    "critic_grad_norm": ("algo_critic_grad_norm", "Gradient norm of the critic before clipping."),
    "critic_clip_ratio": ("algo_critic_clip_ratio", "Share of tokens at which the clipped value had the larger error."),
    "value_explained_variance": ("algo_value_explained_variance", "`1 - var(returns - values) / var(returns)`."),
    "singleton_group_ratio": ("algo_singleton_group_ratio", "Share of groups with one sample, which have no baseline."),
    "logprob_mismatch": (
        "algo_logprob_mismatch_nats",
        "Mean absolute difference of learner and engine log-probs, on samples of the learner's own version alone.",
    ),
    "router_aux_loss": ("algo_router_aux_loss", "Auxiliary loss of the routers before its coefficient; 0 if dense."),
    "expert_load_max": ("algo_expert_load_max_ratio", "Load of the busiest expert over its layer's mean; 1 is even."),
    "unused_expert_ratio": ("algo_unused_expert_ratio", "Share of experts that no token of the step chose."),
    "router_replayed_ratio": ("algo_router_replayed_ratio", "Share of expert choices that were replayed."),
}
_LABELLED_GAUGES = {
    "loss": {"policy": "loss", "kl": "kl_loss", "value": "critic_loss"},
    "kl": {"reference": "kl_reference", "behaviour": "kl_behaviour"},
    "clip": {"low": "clip_ratio_low", "high": "clip_ratio_high"},
    "phase_tokens": {phase: f"{phase}_tokens_per_second" for phase in THROUGHPUTS},
}
"""The numbers of a step that gauges show by label."""
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 FLOPs per second, by a part of the device's name. The first match counts."""


def peak_flops(device_name: str, configured: float) -> float:
    if configured:
        return configured
    return next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), 0.0)


def mfu(num_parameters: int, num_tokens: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation of an update, with 6 FLOPs per parameter and token. 0 if the `peak` of all ranks is not
    known."""
    return 6 * num_parameters * num_tokens / (seconds * peak) if peak and seconds else 0.0


class LearnerMetrics:
    """All metrics of the learner controller, on their own registry. Known label values start at 0."""

    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        gauge = partial(Gauge, namespace=PREFIX, registry=registry)
        counter = partial(Counter, namespace=PREFIX, registry=registry)
        seconds = partial(Histogram, namespace=PREFIX, registry=registry, buckets=LONG_SECONDS)
        self.registry = registry
        gauge("build_info", "Always 1.", ["placement", "version"]).labels(placement, __version__).set(1)
        self.steps = counter("learner_steps", "Optimizer steps.")
        self.num_steps = gauge("learner_num_steps", "`learner.num_steps`.")
        self.step_seconds = seconds("learner_step_duration_seconds", "One step, with the wait for its batch.")
        self.phase_seconds = counter("learner_phase_seconds", "Time by phase of a step.", ["phase"])
        self.phase_tokens = gauge("learner_phase_tokens_per_second", "Throughput of a phase, last known.", ["phase"])
        self.compute_seconds = counter(
            "learner_compute_seconds", "Time of forward, backward and optimizer on the policy's ranks."
        )
        self.tokens = counter("learner_tokens", "Tokens of trained sequences.", ["kind"])
        self.mfu = gauge("learner_mfu_ratio", "Model FLOPs over the peak of the devices; 0 if it is not known.")
        self.memory_peak = gauge("learner_memory_peak_bytes", "Peak memory of a policy rank.", ["rank"])
        self.last_step = gauge("learner_last_step_timestamp_seconds", "When the last step ended.")
        self.version = gauge("policy_version", "Newest published version.", ["component"])
        self.staleness = CountedHistogram(
            f"{PREFIX}_trajectory_staleness_versions", "Versions from a group's oldest token to its training.",
            (0, 1, 2, 3, 4, 6, 8, 12, 16, 32), registry,
        )  # fmt: skip
        self.reward = gauge("reward_mean", "Mean reward of `env` in the last batch that had it.", ["env"])
        self.reward_part = gauge(
            "reward_part_mean", "Mean of a part of the reward in the last batch with it.", ["part"]
        )
        self.reward_parts: set[str] = set()
        """Parts that have a series. Their number is limited, because a reward function chooses the names."""
        self.skipped = counter("learner_nonfinite_steps", "Steps skipped for a non-finite loss or gradient.")
        self.role_restarts = counter("learner_role_restarts", "Restarts of a role after a rank died or hung.", ["role"])
        self.quarantines = counter(
            "learner_quarantines", "Servers put into quarantine because their log-probs disagreed."
        )
        self.loss = gauge("algo_loss", "Loss: `policy`; `kl`, with its coefficient; `value`, with a critic.", ["term"])
        self.kl = gauge("algo_kl_nats", "Mean KL per trained token against a policy.", ["against"])
        self.clip = gauge("algo_clip_ratio", "Share of trained tokens clipped, `low` and `high`.", ["side"])
        self.importance_ratio = CountedHistogram(
            f"{PREFIX}_algo_importance_ratio", "Policy over behaviour policy at trained tokens.", RATIO_EDGES,
            registry,
        )  # fmt: skip
        self.algorithm = {key: gauge(name, text) for key, (name, text) in _ALGORITHM_GAUGES.items()}
        self.server_mismatch = gauge(
            "algo_server_logprob_mismatch_nats", "Difference of log-probs on the samples compared last.", ["server"]
        )
        self.server_limit = gauge(
            "algo_server_logprob_limit_nats", "Difference beyond which a server disagrees.", ["server"]
        )
        self._compared_servers: set[str] = set()
        self.sync_seconds = seconds("weight_sync_duration_seconds", "A push by phase.", ["transport", "phase"])
        self.sync_bytes = counter("weight_sync_bytes", "Bytes of committed pushes, over all servers.")
        self.syncs = counter("weight_syncs", "Servers and versions by the result of a push.", ["result"])
        self.sync_success = gauge("weight_sync_last_success_timestamp_seconds", "Last push that a server committed.")
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.checkpoint_success = gauge("checkpoint_last_success_timestamp_seconds", "Last committed checkpoint.")
        self.checkpoint_seconds = seconds("checkpoint_duration_seconds", "One checkpoint, with its commit.")
        self.upload_success = gauge(
            "checkpoint_upload_last_success_timestamp_seconds", "Last upload of a checkpoint; 0 before the first."
        )
        self.upload_seconds = seconds("checkpoint_upload_duration_seconds", "One upload of a checkpoint.")
        self.upload_failures = counter(
            "checkpoint_upload_failures", "Failed calls of the object store, with those that were retried."
        )
        self.recovery_seconds = seconds(
            "recovery_duration_seconds", "From the last heartbeat before a crash to the next step.", ["component"]
        )
        known: dict[Counter | Histogram, tuple[str, ...]] = {
            self.phase_seconds: PHASES, self.tokens: ("prompt", "response"), self.role_restarts: ROLES,
            self.recovery_seconds: ("learner",), self.syncs: ("committed", "failed", "superseded", "nonfinite"),
        }  # fmt: skip
        for metric, values in known.items():
            for value in values:
                metric.labels(value)

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
        for name, labels in _LABELLED_GAUGES.items():
            for label, key in labels.items():
                if key in metrics:
                    getattr(self, name).labels(label).set(metrics[key])
        self.skipped.inc(max(metrics["skipped"], metrics.get("critic_skipped", 0.0)))
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
