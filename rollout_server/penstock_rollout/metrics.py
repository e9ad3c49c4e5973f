"""Prometheus metrics of a rollout server. The same endpoint also serves the engine's own metrics (`vllm:*`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from penstock.metrics import LONG_SECONDS, PREFIX, SHORT_SECONDS, CountedHistogram, HostMemoryGauges

REWARD_ERRORS = ("exception", "timeout", "worker_died")


class RolloutMetrics:
    """The metrics, registered with `registry`. Labels whose values are known in advance start at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace=PREFIX, registry=registry)
        counter = partial(Counter, namespace=PREFIX, registry=registry)
        histogram = partial(Histogram, namespace=PREFIX, registry=registry)

        def counted(name: str, text: str, buckets: Sequence[float]) -> CountedHistogram:
            return CountedHistogram(f"{PREFIX}_{name}", text, buckets, registry)

        self.registry = registry
        HostMemoryGauges(registry)
        self.info = gauge("rollout_info", "Always 1.", ["server", "engine"])
        self.produced = counter("groups_produced", "Groups accepted by the queue, by data source.", ["env"])
        self.trajectories = counter("trajectories_produced", "Samples scored, also of evaluations.", ["env"])
        self.version = gauge("policy_version", "Version served.", ["component"])
        self.pinned = gauge("policy_pinned", "1 while an operator or a validation holds the server at a version.")
        self.inflight = gauge("rollout_inflight", "Prompts leased and being worked on.")
        self.outbox = gauge("rollout_outbox_groups", "Accepted groups that no checkpoint covers yet.")
        self.paused = counter("rollout_paused_seconds", "Time during which decoding was paused.", ["reason"])
        self.episode_seconds = counted(
            "rollout_episode_duration_seconds", "Time of one group, from lease to append.", LONG_SECONDS
        )
        self.response_tokens = counted(
            "rollout_response_tokens", "Length of responses.", [2**power for power in range(2, 16)]
        )
        self.truncated = counter("rollout_truncated", "Responses cut at a limit on tokens or turns.")
        self.prompts_truncated = counter("rollout_prompts_truncated", "Prompts cut to `rollout.prompt.max_tokens`.")
        self.version_span = counted(
            "trajectory_version_span", "Newest minus oldest version of a trajectory.", (0, 1, 2, 3, 4, 6, 8, 12, 16)
        )
        self.turns = counted("rollout_turns", "Assistant turns of a sample.", (1, 2, 3, 4, 6, 8, 16, 32))
        self.tool_calls = counter("tool_calls", "Tool calls.", ["tool", "result"])
        self.tool_seconds = histogram("tool_duration_seconds", "One tool call.", buckets=SHORT_SECONDS)
        self.concurrency_limit = gauge("rollout_concurrency_limit", "Groups that may be generated at once.")
        self.reward_seconds = counted("reward_duration_seconds", "Scoring one group.", SHORT_SECONDS)
        self.reward_errors = counter("reward_errors", "Rewards that failed.", ["kind"])
        self.failures = counter("rollout_failures", "Prompts given back, by kind of error.", ["reason"])
        self.saved_tokens = counter("rollout_saved_tokens", "Tokens of unfinished groups that were saved in Redis.")
        self.continued_tokens = counter(
            "rollout_continued_tokens", "Tokens that another lease had saved and this one continued."
        )
        self.regenerated_tokens = counter(
            "rollout_regenerated_tokens",
            "Tokens of other leases that are generated again: too old to be continued, or lost with a server (an "
            "estimate).",
            ["reason"],
        )
        self.append_wait = counter("rollout_append_wait_seconds", "Time spent waiting for room in the queue.")
        self.recovery_seconds = histogram(
            "recovery_duration_seconds", "From the end of serving to the next serving.", ["component"],
            buckets=LONG_SECONDS,
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
        self.trajectories.labels(data_source or "default").inc(len(turns))
        self.turns.observe_all(turns)
        self.response_tokens.observe_all(num_tokens)
        self.version_span.observe_all(version_spans)
        if num_truncated:
            self.truncated.inc(num_truncated)


class GeneratingSeconds(Collector):
    """The time in which the engine had something to generate. The rest of the time the server was idle."""

    def __init__(self) -> None:
        self.seconds: Callable[[], float] = lambda: 0.0
        """Called when it is scraped."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            f"{PREFIX}_rollout_generating_seconds",
            "Time during which the engine had at least one request, pauses included.",
            value=self.seconds(),
        )
