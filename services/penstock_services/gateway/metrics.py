"""All metrics of a gateway: its requests and sessions, and its run, which is read from Redis at each scrape."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import RUN_STATES, RunFacts, RunStores
from penstock.diagnosis.progress import LEARNING_CODES, SPEED_CODES, learning_finding, speed_finding
from penstock.metrics import SHORT_SECONDS, DiskGauges, HostMemoryGauges
from penstock.replay.queue_types import QueueStat
from penstock.sessions.task_store import TaskStat
from penstock.store.redis_client import RedisMemory, read_redis_memory
from penstock.v1 import runs_pb2
from penstock_services.gateway.sessions.recorder import SessionTraffic

_EDGES = (*map(str, SHORT_SECONDS), "+Inf")


class RequestSeries(Collector):
    """Counters of requests, without the locks of prometheus_client's counters, which would be most of their cost.

    Only the event loop may write and read them."""

    def __init__(self) -> None:
        self.inflight: defaultdict[str, int] = defaultdict(int)
        self.answered: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Number of answers by protocol, route and code."""
        self.durations: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(_EDGES) + 1))
        """Number of requests in each bucket, and last the sum of their durations, by protocol and route."""

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_gateway_requests", "Requests answered.", labels=["protocol", "route", "code"]
        )
        for answered, count in self.answered.items():
            requests.add_metric(answered, count)
        yield requests
        duration = HistogramMetricFamily(
            "penstock_gateway_request_duration_seconds", "Time to answer.", labels=["protocol", "route"]
        )
        for labels, (*counts, total) in self.durations.items():
            duration.add_metric(labels, list(zip(_EDGES, accumulate(counts), strict=True)), total)
        yield duration
        inflight = GaugeMetricFamily(
            "penstock_gateway_inflight_requests", "Requests being served.", labels=["protocol"]
        )
        for protocol, count in self.inflight.items():
            inflight.add_metric([protocol], count)
        yield inflight


class Observation:
    """Context manager of one request. Its route and code are set once they are known."""

    __slots__ = ("_protocol", "_series", "_started", "code", "route")

    def __init__(self, series: RequestSeries, protocol: str) -> None:
        self.route = "unmatched"
        """The route's template and not the path, so that there are few labels."""
        self.code = "INTERNAL"
        self._series = series
        self._protocol = protocol

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._series.inflight[self._protocol] += 1
        return self

    def __exit__(self, *_: object) -> None:
        series, protocol, took_s = self._series, self._protocol, time.perf_counter() - self._started
        series.inflight[protocol] -= 1
        series.answered[protocol, self.route, self.code] += 1
        durations = series.durations[protocol, self.route]
        durations[bisect_left(SHORT_SECONDS, took_s)] += 1
        durations[-1] += took_s


_PREFIX = "penstock_gateway_session_"


class SessionCollector(Collector):
    """Set `traffic` once and `stat` at each scrape. Without a stat the run's series are absent instead of stale."""

    def __init__(self) -> None:
        self.traffic = SessionTraffic()
        self.cached_bytes = 0
        self.stat: TaskStat | None = None

    def collect(self) -> Iterator[Metric]:
        traffic = self.traffic
        calls = CounterMetricFamily(_PREFIX + "calls", "Recorded calls of sessions.", labels=["kind"])
        first = traffic.num_calls - traffic.num_continued - traffic.num_forked
        for kind, count in (("first", first), ("continued", traffic.num_continued), ("forked", traffic.num_forked)):
            calls.add_metric([kind], count)
        yield calls
        for name, text, count in (
            ("moved_calls", "Continued calls that went to another server.", traffic.num_moved),
            ("history_tokens", "Earlier tokens in the prompts of continued calls.", traffic.history_tokens),
            ("cached_tokens", "Those that the server has answered before.", traffic.cached_tokens),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=count)
        yield GaugeMetricFamily(_PREFIX + "cache_bytes", "Memory of cached sessions.", value=self.cached_bytes)
        if self.stat is not None:
            yield from _of_run(self.stat)


def _of_run(stat: TaskStat) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_sessions", "Sessions with recorded calls.", value=stat.sessions)
    yield GaugeMetricFamily("penstock_session_bytes", "Bytes of recorded calls in Redis.", value=stat.session_bytes)
    places = GaugeMetricFamily("penstock_task_places", "Sessions that tasks still want.", labels=["state"])
    places.add_metric(["pending"], stat.pending)
    places.add_metric(["leased"], stat.leased)
    yield places
    ended = CounterMetricFamily("penstock_task_places_ended", "Sessions of tasks that ended.", labels=["outcome"])
    for outcome in ("rewarded", "failed", "dropped", "reclaimed"):
        ended.add_metric([outcome], getattr(stat, outcome))
    yield ended
    yield GaugeMetricFamily("penstock_open_tasks", "Tasks that were begun.", value=stat.open_tasks)
    tasks = CounterMetricFamily("penstock_tasks_ended", "Tasks that ended.", labels=["outcome"])
    tasks.add_metric(["finished"], stat.finished_tasks)
    tasks.add_metric(["failed"], stat.failed_tasks)
    yield tasks


_DEAD_REASONS = ("corrupt", "schema", "shape", "non_finite", "identity")
_EXPIRED_REASONS = ("stale", "no_spread", "quarantined", "reward_failed")
"""Known reasons. Their series start at 0, so that a first increase is seen."""
_LEVELS = {"ok": 1, "warn": 2, "fail": 3}
"""Value of the finding that a run has; the others are 0."""


@dataclass(frozen=True)
class RunSnapshot:
    """The facts of a run, and what only its metrics show."""

    facts: RunFacts
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)
    expired_reasons: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    redis_memory: RedisMemory | None = None

    @classmethod
    async def take(cls, stores: RunStores, config: RunConfig) -> RunSnapshot:
        queue = stores.queue
        return cls(
            await stores.read(config),
            await queue.dead_letter_reasons(),
            await queue.expired_reasons(),
            await stores.heartbeats.restarts(),
            await queue.evaluation_scores(),
            await read_redis_memory(queue.client, queue.keys),
        )


class RunCollector(Collector):
    """Collects the run's metrics. The label `queue` is `prompts` for rollout servers and `groups` for the learner."""

    def __init__(self) -> None:
        self.snapshot: RunSnapshot | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        stat, replay = self.snapshot.facts.stat, self.snapshot.facts.config.replay
        ready = stat.queued - stat.delivered
        yield _by_queue("depth", "Waiting entries.", prompts=stat.pending_prompts, groups=ready)
        yield _by_queue(
            "in_flight", "Entries handed out and not yet finished.", prompts=stat.in_flight, groups=stat.delivered
        )
        yield _by_queue("bytes", "Bytes of waiting groups.", groups=stat.queued_bytes)
        yield _by_queue("saved_bytes", "Bytes of saved tokens of unfinished samples.", prompts=stat.saved_bytes)
        yield _by_queue("capacity_bytes", "Bytes at which producers wait.", groups=replay.capacity_bytes)
        ages = {"prompts": stat.pending_age_ms / 1000, "groups": stat.ready_age_ms / 1000}
        yield _by_queue("oldest_age_seconds", "Age of the next entry in line.", **ages)
        for name in ("admitted", "inserted", "trained", "redelivered", "reclaimed"):
            yield CounterMetricFamily(f"penstock_{name}", f"Groups {name}.", value=getattr(stat, name))
        dead = dict.fromkeys(_DEAD_REASONS, 0) | self.snapshot.dead_letter_reasons
        expired = dict.fromkeys(_EXPIRED_REASONS, 0) | self.snapshot.expired_reasons
        yield _counters("dead_lettered", "Groups dead-lettered as unusable.", "reason", dead)
        yield _counters("expired", "Groups dropped: too old, not worth training, or cancelled.", "reason", expired)
        yield from self._limiter(stat, replay.max_staleness)
        yield from self._state(self.snapshot)
        yield from self._parts(self.snapshot)
        yield GaugeMetricFamily(
            "penstock_conservation_error",
            "admitted - trained - expired - dead_lettered - queued - in_flight; anything but 0 is a lost group.",
            value=stat.conservation_error,
        )

    def _state(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        """State of the run, operators' orders, what the run waits for, and the memory that is left for it."""
        facts = snapshot.facts
        states = {state.lower(): int(state == facts.state) for state in RUN_STATES}
        yield _gauges("run_state", "1 for the current state of the run.", "state", states)
        is_paused, is_own = facts.orders.is_paused, bool(facts.pause_reason)
        pauses = {"operator": int(is_paused and not is_own), "run": int(is_paused and is_own)}
        yield _gauges("run_paused", "1 if the run is paused by an operator, or by the run itself.", "who", pauses)
        yield CounterMetricFamily("penstock_roll_backs", "Roll backs of the policy.", value=facts.orders.roll_backs)
        for name, documentation, codes, finding in (
            ("learning", "Whether the reward rises, or why not.", LEARNING_CODES, learning_finding(facts)),
            ("speed", "What the run waits for most.", SPEED_CODES, speed_finding(facts)),
        ):
            levels: dict[str, int] = {code: _LEVELS[finding.level] if code == finding.code else 0 for code in codes}
            yield _gauges(f"run_{name}", documentation, "verdict", levels)
        if memory := snapshot.redis_memory:
            yield GaugeMetricFamily("penstock_redis_memory_used_bytes", "Memory of Redis.", value=memory.used_bytes)
            yield GaugeMetricFamily(
                "penstock_redis_memory_limit_bytes", "Memory that Redis may use.", value=memory.limit_bytes
            )

    def _parts(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        """State of the run's parts."""
        by_state: dict[str, int] = Tally(server.state for server in snapshot.facts.servers)
        servers = {state: by_state.get(state, 0) for state in runs_pb2.Server.State.keys()[1:]}
        yield _gauges("rollout_servers", "Rollout servers by state.", "state", servers)
        yield GaugeMetricFamily(
            "penstock_rollout_servers_paused",
            "Rollout servers that lease nothing because everything that they tried failed.",
            value=len(snapshot.facts.breakers),
        )
        yield GaugeMetricFamily(
            "penstock_rollout_servers_quarantined",
            "Rollout servers whose groups are not trained because their log-probs disagree with the learner's.",
            value=len(snapshot.facts.quarantines),
        )
        ages = snapshot.facts.ages_s
        yield _gauges("heartbeat_age_seconds", "Time since the last heartbeat.", "component", ages)
        restarts = snapshot.restarts
        yield _counters("component_restarts", "Restarts of a component.", "component", restarts)
        yield _gauges("eval_score", "Mean reward of the newest finished evaluation.", "benchmark", snapshot.scores)

    def _limiter(self, stat: QueueStat, max_staleness: int) -> Iterator[Metric]:
        """Limits of admission and how close the run is to them."""
        for name, documentation, value in (
            ("staleness_limit_versions", "Largest staleness that admission allows.", max_staleness),
            ("queue_admission_limit", "Upper bound on trained + queued + in-flight groups.", stat.admission_limit),
            ("queue_admission_room", "Prompts that may be admitted now.", stat.admission_room),
            ("queue_samples_per_insert", "Groups trained per group appended.", stat.samples_per_insert),
        ):
            yield GaugeMetricFamily(f"penstock_{name}", documentation, value=value)


def _counters(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"penstock_{name}", documentation, labels=[label])
    for value_of_label, value in sorted(values.items()):
        family.add_metric([value_of_label], value)
    return family


def _gauges(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"penstock_{name}", documentation, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


def _by_queue(name: str, documentation: str, **values: float) -> Metric:
    return _gauges(f"queue_{name}", documentation, "queue", values)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        self.registry = registry
        self.requests = RequestSeries()
        registry.register(self.requests)
        info = Gauge("penstock_build_info", "Always 1.", ["placement", "version"], registry=registry)
        info.labels(placement, __version__).set(1)
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.keys = Gauge("penstock_gateway_api_keys", "API keys that are valid.", registry=registry)
        self.broken_key_files = Gauge(
            "penstock_gateway_broken_key_files", "Files of API keys that cannot be used.", registry=registry
        )
        self.sessions = SessionCollector()
        registry.register(self.sessions)
        self.run = RunCollector()
        registry.register(self.run)

    def observe(self, protocol: str) -> Observation:
        """A context manager that counts and times one request."""
        return Observation(self.requests, protocol)

    def set_keys(self, num_keys: int, num_broken_files: int) -> None:
        self.keys.set(num_keys)
        self.broken_key_files.set(num_broken_files)

    def render(self, snapshot: RunSnapshot | None) -> bytes:
        """Metrics in the Prometheus text format. Without a snapshot the run's series are absent instead of stale."""
        self.run.snapshot = snapshot
        return generate_latest(self.registry)
