"""All metrics of a gateway: its requests and sessions, and its run, which is read from Redis at each scrape."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import RUN_STATES, RunFacts, RunStores
from penstock.diagnosis.progress import LEARNING_CODES, SPEED_CODES, learning_finding, speed_finding
from penstock.metrics import SHORT_SECONDS, DiskGauges, HostMemoryGauges
from penstock.replay.queue_types import DropReason
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
        requests: Row = ("gateway_requests", "Requests answered.", "protocol route code", self.answered)
        yield from _families(CounterMetricFamily, [requests])
        duration = HistogramMetricFamily(
            "penstock_gateway_request_duration_seconds", "Time to answer.", labels=["protocol", "route"]
        )
        for labels, (*counts, total) in self.durations.items():
            duration.add_metric(labels, list(zip(_EDGES, accumulate(counts), strict=True)), total)
        yield duration
        inflight: Row = ("gateway_inflight_requests", "Requests being served.", "protocol", self.inflight)
        yield from _families(GaugeMetricFamily, [inflight])


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


Row = tuple[str, str, str, Mapping[str, float] | Mapping[tuple[str, str, str], float] | float]
"""Name, documentation, labels and values of a family, or its value if it has no label. Labels have spaces between."""


def _families(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], rows: Iterable[Row]) -> Iterator[Metric]:
    for name, text, labels, values in rows:
        if not isinstance(values, Mapping):
            yield kind(f"penstock_{name}", text, value=values)
            continue
        family = kind(f"penstock_{name}", text, labels=labels.split())
        for key, value in values.items():
            family.add_metric([key] if isinstance(key, str) else key, value)
        yield family


class SessionCollector(Collector):
    """Set `traffic` once and `stat` at each scrape. Without a stat the run's series are absent instead of stale."""

    def __init__(self) -> None:
        self.traffic = SessionTraffic()
        self.cached_bytes = 0
        self.stat: TaskStat | None = None

    def collect(self) -> Iterator[Metric]:
        traffic, stat = self.traffic, self.stat
        first = traffic.num_calls - traffic.num_continued - traffic.num_forked
        calls = {"first": first, "continued": traffic.num_continued, "forked": traffic.num_forked}
        counters: list[Row] = [
            ("gateway_session_calls", "Recorded calls of sessions.", "kind", calls),
            ("gateway_session_moved_calls", "Continued calls that went to another server.", "", traffic.num_moved),
            ("gateway_session_history_tokens", "Earlier tokens in the prompts of continued calls.", "",
             traffic.history_tokens),
            ("gateway_session_cached_tokens", "Part of them that the server has cached.", "", traffic.cached_tokens),
        ]  # fmt: skip
        gauges: list[Row] = [("gateway_session_cache_bytes", "Memory of remembered sessions.", "", self.cached_bytes)]
        if stat is not None:
            outcomes = {name: getattr(stat, name) for name in ("rewarded", "failed", "dropped", "reclaimed")}
            ended = {"finished": stat.finished_tasks, "failed": stat.failed_tasks}
            places = {"pending": stat.pending, "leased": stat.leased}
            counters += [
                ("task_places_ended", "Sessions of tasks that ended.", "outcome", outcomes),
                ("tasks_ended", "Tasks that ended.", "outcome", ended),
            ]
            gauges += [
                ("sessions", "Sessions with recorded calls.", "", stat.sessions),
                ("session_bytes", "Bytes of recorded calls in Redis.", "", stat.session_bytes),
                ("task_places", "Sessions that tasks still want.", "state", places),
                ("open_tasks", "Tasks with a leased session that are not complete.", "", stat.open_tasks),
            ]
        yield from _families(CounterMetricFamily, counters)
        yield from _families(GaugeMetricFamily, gauges)


_DEAD_REASONS = ("corrupt", "schema", "shape", "non_finite", "identity")
"""Known reasons. Their series, and those of DropReason, start at 0, so that a first increase is seen."""
_LEVELS = {"OK": 1, "WARN": 2, "FAIL": 3}
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
            await stores.read(config), await queue.dead_letter_reasons(), await queue.expired_reasons(),
            await stores.heartbeats.restarts(), await queue.evaluation_scores(),
            await read_redis_memory(queue.client, queue.keys),
        )  # fmt: skip


class RunCollector(Collector):
    """Collects the run's metrics. The label `queue` is `prompts` for rollout servers and `groups` for the learner."""

    def __init__(self) -> None:
        self.snapshot: RunSnapshot | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is not None:
            yield from _families(CounterMetricFamily, _run_counters(self.snapshot))
            yield from _families(GaugeMetricFamily, _run_gauges(self.snapshot))


def _run_counters(snapshot: RunSnapshot) -> Iterator[Row]:
    stat = snapshot.facts.stat
    for name, text in (
        ("admitted", "Prompts admitted: first leases, and leases after an expiry."),
        ("inserted", "Groups accepted by `append`."),
        ("trained", "Groups covered by a committed checkpoint."),
        ("redelivered", "Groups handed to a learner again after a restart."),
        ("reclaimed", "Leases that ran out."),
    ):
        yield name, text, "", getattr(stat, name)
    dead = dict.fromkeys(_DEAD_REASONS, 0) | snapshot.dead_letter_reasons
    expired = dict.fromkeys(get_args(DropReason), 0) | snapshot.expired_reasons
    yield "dead_lettered", "Prompts moved to the dead letters, by the first word of the reason.", "reason", dead
    yield "expired", "Groups dropped: too old, not worth training, or cancelled.", "reason", expired
    yield "rewinds", "Orders to rewind the policy to an older version.", "", snapshot.facts.orders.num_rewinds
    yield "component_restarts", "Starts of a process after its first.", "component", snapshot.restarts


def _run_gauges(snapshot: RunSnapshot) -> Iterator[Row]:
    facts, stat, replay = snapshot.facts, snapshot.facts.stat, snapshot.facts.config.replay
    depths = {"prompts": stat.pending_prompts, "groups": stat.queued - stat.delivered}
    in_flight = {"prompts": stat.in_flight, "groups": stat.delivered}
    ages = {"prompts": stat.pending_age_ms / 1000, "groups": stat.ready_age_ms / 1000}
    for name, text, values in (
        ("depth", "Waiting entries.", depths),
        ("in_flight", "Entries handed out and not yet finished.", in_flight),
        ("bytes", "Bytes of waiting groups.", {"groups": stat.queued_bytes}),
        ("saved_bytes", "Bytes of saved tokens of unfinished samples.", {"prompts": stat.saved_bytes}),
        ("capacity_bytes", "`replay.capacity_bytes`, at which producers wait.", {"groups": replay.capacity_bytes}),
        ("oldest_age_seconds", "Time that the oldest entry has waited; 0 if none waits.", ages),
    ):
        yield f"queue_{name}", text, "queue", values
    yield "staleness_limit_versions", "`replay.max_staleness`.", "", replay.max_staleness
    yield "queue_admission_limit", "Upper bound on trained + queued + in-flight groups.", "", stat.admission_limit
    yield "queue_admission_room", "Prompts that the staleness bound allows to admit now.", "", stat.admission_room
    yield "queue_samples_per_insert", "Groups trained per group appended.", "", stat.samples_per_insert
    balance = "admitted - trained - expired - dead_lettered - queued - in_flight; anything but 0 is a lost group."
    yield "conservation_error", balance, "", stat.conservation_error

    states = {state.lower(): int(state == facts.state) for state in RUN_STATES}
    yield "run_state", "1 for the current state of the run.", "state", states
    is_paused, is_own = facts.orders.is_paused, bool(facts.pause_reason)
    pauses = {"operator": int(is_paused and not is_own), "run": int(is_paused and is_own)}
    yield "run_paused", "1 if an operator, or the run itself, has paused the run.", "who", pauses
    for name, text, codes, finding in (
        ("run_learning", "Whether the reward rises, or why not.", LEARNING_CODES, learning_finding(facts)),
        ("run_speed", "What the run waits for most.", SPEED_CODES, speed_finding(facts)),
    ):
        levels: dict[str, float] = {code: _LEVELS[finding.level] if code == finding.code else 0 for code in codes}
        yield name, text, "finding", levels
    if memory := snapshot.redis_memory:
        yield "redis_memory_used_bytes", "Memory of Redis.", "", memory.used_bytes
        yield "redis_memory_limit_bytes", "`maxmemory` of Redis, or the memory of its machine.", "", memory.limit_bytes

    by_state: Tally[str] = Tally(server.state for server in facts.servers)
    servers = {state: by_state[state] for state in runs_pb2.Server.State.keys()[1:]}
    yield "rollout_servers", "Registered servers by state; a killed server keeps its last.", "state", servers
    paused = "Rollout servers that lease nothing because everything that they tried failed."
    yield "rollout_servers_paused", paused, "", len(facts.breakers)
    apart = "Rollout servers whose groups are not trained because their log-probs disagree with the learner's."
    yield "rollout_servers_quarantined", apart, "", len(facts.quarantines)
    yield "heartbeat_age_seconds", "Time since the last heartbeat.", "component", facts.ages_s
    yield "eval_score", "Mean reward of the newest finished evaluation, or another score.", "benchmark", snapshot.scores


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        self.registry = registry
        self.requests = RequestSeries()
        registry.register(self.requests)
        info = Gauge("penstock_build_info", "Always 1.", ["placement", "version"], registry=registry)
        info.labels(placement, __version__).set(1)
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.keys = Gauge("penstock_gateway_api_keys", "Valid API keys; 0 if no one can call.", registry=registry)
        self.broken_key_files = Gauge(
            "penstock_gateway_broken_key_files", "Files of API keys that cannot be used.", registry=registry
        )
        self.sessions = SessionCollector()
        registry.register(self.sessions)
        self.run = RunCollector()
        registry.register(self.run)

    def observe(self, protocol: str) -> Observation:
        return Observation(self.requests, protocol)

    def render(self, snapshot: RunSnapshot | None) -> bytes:
        """Metrics in the Prometheus text format. Without a snapshot the run's series are absent instead of stale."""
        self.run.snapshot = snapshot
        return generate_latest(self.registry)
