"""Prometheus metrics of a rollout server. The same endpoint also serves the engine's own metrics (`vllm:*`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from penstock.metrics import LONG_SECONDS, PREFIX, SHORT_SECONDS, Children, CountedHistogram, HostMemoryGauges

REWARD_ERRORS = ("exception", "timeout", "worker_died")


class RolloutMetrics:
    """The metrics, registered with `registry`. Labels whose values are known in advance start at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def name(suffix: str) -> str:
            return f"{PREFIX}_{suffix}"

        self.registry = registry
        self._child = Children()
        HostMemoryGauges(registry)
        self.info = Gauge(name("rollout_info"), "Always 1.", ["server", "engine"], registry=registry)
        self.produced = Counter(name("groups_produced"), "Groups appended to the queue.", ["env"], registry=registry)
        self.trajectories = Counter(name("trajectories_produced"), "Samples generated.", ["env"], registry=registry)
        self.version = Gauge(name("policy_version"), "Policy version served.", ["component"], registry=registry)
        self.pinned = Gauge(
            name("policy_pinned"),
            "1 while an operator or a validation holds the server at a version.",
            registry=registry,
        )
        self.inflight = Gauge(name("rollout_inflight"), "Groups that are being generated.", registry=registry)
        self.outbox = Gauge(name("rollout_outbox_groups"), "Groups that no checkpoint covers yet.", registry=registry)
        self.paused = Counter(
            name("rollout_paused_seconds"), "Time during which decoding was paused.", ["reason"], registry=registry
        )
        self.episode_seconds = CountedHistogram(
            name("rollout_episode_duration_seconds"), "Time of one group, from lease to append.", LONG_SECONDS, registry
        )
        self.response_tokens = CountedHistogram(
            name("rollout_response_tokens"), "Length of responses.", [2**power for power in range(2, 16)], registry
        )
        self.truncated = Counter(name("rollout_truncated"), "Responses cut at max_tokens.", registry=registry)
        self.prompts_truncated = Counter(
            name("rollout_prompts_truncated"), "Prompts truncated to fit.", registry=registry
        )
        self.version_span = CountedHistogram(
            name("trajectory_version_span"), "Versions within one trajectory, minus one.",
            (0, 1, 2, 3, 4, 6, 8, 12, 16), registry,
        )  # fmt: skip
        self.turns = CountedHistogram(
            name("rollout_turns"), "Assistant turns of a sample.", (1, 2, 3, 4, 6, 8, 16, 32), registry
        )
        self.tool_calls = Counter(name("tool_calls"), "Tool calls.", ["tool", "result"], registry=registry)
        self.tool_seconds = Histogram(
            name("tool_duration_seconds"), "One tool call.", registry=registry, buckets=SHORT_SECONDS
        )
        self.concurrency_limit = Gauge(
            name("rollout_concurrency_limit"), "Groups that may be generated at once.", registry=registry
        )
        self.reward_seconds = CountedHistogram(
            name("reward_duration_seconds"), "Scoring one group.", SHORT_SECONDS, registry
        )
        self.reward_errors = Counter(name("reward_errors"), "Rewards that failed.", ["kind"], registry=registry)
        self.failures = Counter(
            name("rollout_failures"), "Prompts given back, by reason.", ["reason"], registry=registry
        )
        self.saved_tokens = Counter(
            name("rollout_saved_tokens"), "Tokens of unfinished groups that were saved in Redis.", registry=registry
        )
        self.continued_tokens = Counter(
            name("rollout_continued_tokens"), "Tokens that another lease had saved and this one continued.",
            registry=registry,
        )  # fmt: skip
        self.regenerated_tokens = Counter(
            name("rollout_regenerated_tokens"),
            "Tokens of other leases that are generated again: too old to be continued, or lost with a server (an "
            "estimate).",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.append_wait = Counter(
            name("rollout_append_wait_seconds"), "Time spent waiting for room in the queue.", registry=registry
        )
        self.recovery_seconds = Histogram(
            name("recovery_duration_seconds"), "Time during which the server was not serving.", ["component"],
            registry=registry, buckets=LONG_SECONDS,
        )  # fmt: skip
        self.generating = GeneratingSeconds()
        registry.register(self.generating)
        self.paused.labels("weights")
        self.recovery_seconds.labels("rollout")
        for reason in ("stale", "lost"):
            self.regenerated_tokens.labels(reason)
        for kind in REWARD_ERRORS:
            self.reward_errors.labels(kind)

    def record_samples(
        self, data_source: str, turns: list[int], num_tokens: list[int], version_spans: list[int], num_truncated: int
    ) -> None:
        """Record the samples of a group. Each list has one entry per sample."""
        self._child(self.trajectories, data_source or "default").inc(len(turns))
        self.turns.observe_all(turns)
        self.response_tokens.observe_all(num_tokens)
        self.version_span.observe_all(version_spans)
        if num_truncated:
            self.truncated.inc(num_truncated)

    def count_group(self, data_source: str) -> None:
        self._child(self.produced, data_source or "default").inc()


class GeneratingSeconds(Collector):
    """The time in which the engine had something to generate. The rest of the time the server was idle."""

    def __init__(self) -> None:
        self.seconds: Callable[[], float] = lambda: 0.0
        """Called when it is scraped."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            f"{PREFIX}_rollout_generating_seconds",
            "Time during which the engine had at least one request.",
            value=self.seconds(),
        )
