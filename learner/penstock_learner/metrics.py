"""Prometheus metrics of the learner. Names and labels are those of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.metrics import PREFIX
from penstock_learner.weights.publisher import PushReport

_ALGORITHM_GAUGES = {
    "entropy": ("algo_entropy_nats", "Mean entropy of the sampled distribution."),
    "grad_norm": ("algo_grad_norm", "Gradient norm before clipping."),
    "is_truncated_ratio": ("algo_is_truncated_ratio", "Share of tokens whose importance weight was truncated."),
    "effective_sample_ratio": ("algo_effective_sample_ratio", "(sum w)^2 / (n sum w^2) of the importance weights."),
    "zero_advantage_group_ratio": ("algo_zero_advantage_group_ratio", "Share of groups without reward spread."),
    "critic_grad_norm": ("algo_critic_grad_norm", "Gradient norm of the critic before clipping."),
    "critic_clip_ratio": ("algo_critic_clip_ratio", "Share of tokens whose value was clipped."),
    "value_explained_variance": ("algo_value_explained_variance", "1 - var(returns - values) / var(returns)."),
    "logprob_mismatch": ("algo_logprob_mismatch_nats", "Mean |learner - engine| log-prob where one version made all."),
}


class LearnerMetrics:
    """All metrics of the learner controller, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        def name(suffix: str) -> str:
            return f"{PREFIX}_{suffix}"

        self.registry = registry
        Gauge(name("build_info"), "Always 1.", ["placement"], registry=registry).labels(placement).set(1)
        self.steps = Counter(name("learner_steps"), "Optimizer steps.", registry=registry)
        self.step_seconds = Histogram(name("learner_step_duration_seconds"), "One step.", registry=registry)
        self.phase_seconds = Counter(name("learner_phase_seconds"), "Time by phase.", ["phase"], registry=registry)
        self.tokens = Counter(name("learner_tokens"), "Tokens trained.", ["kind"], registry=registry)
        self.last_step = Gauge(
            name("learner_last_step_timestamp_seconds"), "When the last step ended.", registry=registry
        )
        self.version = Gauge(name("policy_version"), "Version held.", ["component"], registry=registry)
        self.staleness = Histogram(
            name("trajectory_staleness_versions"), "Versions between sampling and training, by group.",
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32), registry=registry,
        )  # fmt: skip
        self.reward = Gauge(name("reward_mean"), "Mean reward of the last batch.", ["env"], registry=registry)
        self.loss = Gauge(name("algo_loss"), "Loss by term.", ["term"], registry=registry)
        self.kl = Gauge(name("algo_kl_nats"), "Mean KL per token.", ["against"], registry=registry)
        self.clip = Gauge(name("algo_clip_ratio"), "Share of clipped tokens.", ["side"], registry=registry)
        self.skipped = Counter(
            name("learner_nonfinite_steps"), "Steps skipped for a non-finite gradient.", registry=registry
        )
        self.role_restarts = Counter(
            name("learner_role_restarts"), "Restarts of a role after a rank died or hung.", ["role"], registry=registry
        )
        self.algorithm = {
            key: Gauge(name(suffix), text, registry=registry) for key, (suffix, text) in _ALGORITHM_GAUGES.items()
        }
        self.sync_seconds = Histogram(
            name("weight_sync_duration_seconds"), "Weight push by phase.", ["transport", "phase"], registry=registry
        )
        self.sync_bytes = Counter(name("weight_sync_bytes"), "Bytes of committed pushes.", registry=registry)
        self.syncs = Counter(name("weight_syncs"), "Pushes, by member and result.", ["result"], registry=registry)
        self.sync_success = Gauge(
            name("weight_sync_last_success_timestamp_seconds"), "Last push with a committed member.", registry=registry
        )
        self.checkpoint_success = Gauge(
            name("checkpoint_last_success_timestamp_seconds"), "Last durable checkpoint.", registry=registry
        )
        self.checkpoint_seconds = Histogram(name("checkpoint_duration_seconds"), "One checkpoint.", registry=registry)

    def record_step(self, metrics: Mapping[str, float], data_source: str) -> None:
        self.steps.inc()
        self.step_seconds.observe(metrics["step_s"])
        for phase in ("wait", "forward", "update", "gather"):
            self.phase_seconds.labels(phase).inc(metrics[f"{phase}_s"])
        self.tokens.labels("response").inc(metrics["response_tokens"])
        self.last_step.set_to_current_time()
        self.reward.labels(data_source or "default").set(metrics["reward_mean"])
        self.loss.labels("policy").set(metrics["loss"])
        self.kl.labels("reference").set(metrics["kl_reference"])
        self.clip.labels("low").set(metrics["clip_ratio_low"])
        self.clip.labels("high").set(metrics["clip_ratio_high"])
        self.skipped.inc(metrics["skipped"])
        if "critic_loss" in metrics:
            self.loss.labels("value").set(metrics["critic_loss"])
        for key, gauge in self.algorithm.items():
            if key in metrics:
                gauge.set(metrics[key])

    def record_push(self, report: PushReport) -> None:
        for phase, seconds in report.seconds.items():
            self.sync_seconds.labels(report.transport, phase).observe(seconds)
        self.sync_bytes.inc(report.num_bytes)
        self.syncs.labels("committed").inc(len(report.committed))
        self.syncs.labels("failed").inc(len(report.failed))
        if report.committed:
            self.sync_success.set_to_current_time()
