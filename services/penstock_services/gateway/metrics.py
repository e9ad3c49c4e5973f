"""All metrics of a gateway: its requests and sessions, and its run, which is read from Redis at each scrape."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.config.run import RunConfig
from penstock.metrics import SHORT_SECONDS, DiskGauges, HostMemoryGauges
from penstock.replay.queue_types import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.run_state import RUN_STATES, RunFacts, RunState, has_learner, has_servers, is_learner_starting, run_state
from penstock.sessions.task_store import TaskStat
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.heartbeats import Heartbeats
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_memory import RedisMemory, read_redis_memory
from penstock.store.run_control import Orders, RunControl
from penstock.v1 import runs_pb2
from penstock.verdicts import (
    LEARNING_CODES,
    LOOKED_BACK_VERSIONS,
    SPEED_CODES,
    Situation,
    Steps,
    learning_verdict,
    speed_verdict,
    steps_of,
)
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
"""Value of the verdict that a run has; the others are 0."""


@dataclass(frozen=True)
class RunLimits:
    """Facts of the run's config that its metrics use."""

    capacity_bytes: int = 0
    max_staleness: int = 0
    placement: str = ""
    num_steps: int = 0
    silence_s: float = 30.0
    """A part whose last heartbeat is older than this counts as not running."""

    @classmethod
    def of(cls, config: RunConfig) -> RunLimits:
        replay = config.replay
        return cls(
            replay.capacity_bytes,
            replay.max_staleness,
            config.learner.placement,
            config.learner.num_steps,
            replay.lease_ttl_s,
        )


@dataclass(frozen=True)
class RunSnapshot:
    stat: QueueStat
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)
    expired_reasons: dict[str, int] = field(default_factory=dict)
    servers: Sequence[ServerRecord] = ()
    heartbeat_ages_s: dict[str, float] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    orders: Orders = Orders()
    pause_reason: str = ""
    """Why the run paused itself; empty if it did not."""
    steps: Steps = ()
    """Metrics of the newest steps, oldest first."""
    redis_memory: RedisMemory | None = None
    paused_servers: int = 0
    """Servers whose breaker is open: they lease no prompt because everything that they tried failed."""
    quarantined_servers: int = 0
    is_learner_starting: bool = False
    """Servers whose groups are not trained because their log-probs disagree with the learner's."""

    @classmethod
    async def take(
        cls,
        queue: RedisReplayQueue,
        fleet: Fleet,
        heartbeats: Heartbeats,
        control: RunControl,
        policies: PolicyRegistry,
        phases: Phases,
        silence_s: float,
    ) -> RunSnapshot:
        stat = await queue.stat()
        dead, expired = await queue.dead_letter_reasons(), await queue.expired_reasons()
        servers = await fleet.servers()
        ages = await heartbeats.ages_s() | {server.server_id: server.heartbeat_age_ms / 1000 for server in servers}
        is_starting = await is_learner_starting(phases, has_learner(ages, silence_s))
        restarts, scores = await heartbeats.restarts(), await queue.evaluation_scores()
        orders = await control.orders()
        known = {server.server_id for server in servers}
        return cls(
            stat=stat,
            dead_letter_reasons=dead,
            expired_reasons=expired,
            servers=servers,
            heartbeat_ages_s=ages,
            restarts=restarts,
            scores=scores,
            orders=orders,
            pause_reason=await control.pause_reason() if orders.is_paused else "",
            steps=steps_of(await policies.newest_first(None, LOOKED_BACK_VERSIONS)),
            redis_memory=await read_redis_memory(queue.client, queue.keys),
            paused_servers=sum(breaker.server_id in known for breaker in await control.open_breakers()),
            quarantined_servers=len(known & (await control.quarantines()).keys()),
            is_learner_starting=is_starting,
        )

    def run_state(self, limits: RunLimits) -> RunState:
        return run_state(
            RunFacts(
                step=self.stat.step,
                num_steps=limits.num_steps,
                finished_step=self.stat.finished_step,
                term=self.stat.term,
                orders=self.orders,
                has_learner=has_learner(self.heartbeat_ages_s, limits.silence_s),
                has_servers=has_servers(self.servers),
                is_learner_starting=self.is_learner_starting,
            )
        )


class RunCollector(Collector):
    """Collects the run's metrics. The label `queue` is `prompts` for rollout servers and `groups` for the learner."""

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        self.snapshot: RunSnapshot | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        stat = self.snapshot.stat
        ready = stat.queued - stat.delivered
        yield _by_queue("depth", "Waiting entries.", prompts=stat.pending_prompts, groups=ready)
        yield _by_queue(
            "in_flight", "Entries handed out and not yet finished.", prompts=stat.in_flight, groups=stat.delivered
        )
        yield _by_queue("bytes", "Bytes of waiting groups.", groups=stat.queued_bytes)
        yield _by_queue("saved_bytes", "Bytes of saved tokens of unfinished samples.", prompts=stat.saved_bytes)
        yield _by_queue("capacity_bytes", "Bytes at which producers wait.", groups=self.limits.capacity_bytes)
        ages = {"prompts": stat.pending_age_ms / 1000, "groups": stat.ready_age_ms / 1000}
        yield _by_queue("oldest_age_seconds", "Age of the next entry in line.", **ages)
        for name in ("admitted", "inserted", "trained", "redelivered", "reclaimed"):
            yield CounterMetricFamily(f"penstock_{name}", f"Groups {name}.", value=getattr(stat, name))
        dead = dict.fromkeys(_DEAD_REASONS, 0) | self.snapshot.dead_letter_reasons
        expired = dict.fromkeys(_EXPIRED_REASONS, 0) | self.snapshot.expired_reasons
        yield _counters("dead_lettered", "Groups dead-lettered as unusable.", "reason", dead)
        yield _counters("expired", "Groups dropped: too old, not worth training, or cancelled.", "reason", expired)
        yield from self._limiter(stat)
        yield from self._state(self.snapshot)
        yield from self._parts(self.snapshot)
        yield GaugeMetricFamily(
            "penstock_conservation_error",
            "admitted - trained - expired - dead_lettered - queued - in_flight; anything but 0 is a lost group.",
            value=stat.conservation_error,
        )

    def _state(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        """State of the run, operators' orders, what the run waits for, and the memory that is left for it."""
        current = snapshot.run_state(self.limits)
        states = {state.lower(): int(state == current) for state in RUN_STATES}
        yield _gauges("run_state", "1 for the current state of the run.", "state", states)
        is_paused, is_own = snapshot.orders.is_paused, bool(snapshot.pause_reason)
        pauses = {"operator": int(is_paused and not is_own), "run": int(is_paused and is_own)}
        yield _gauges("run_paused", "1 if the run is paused by an operator, or by the run itself.", "who", pauses)
        yield CounterMetricFamily("penstock_roll_backs", "Roll backs of the policy.", value=snapshot.orders.roll_backs)
        situation = Situation(
            snapshot.steps,
            current,
            snapshot.stat,
            snapshot.servers,
            snapshot.paused_servers,
            self.limits.max_staleness,
        )
        for name, documentation, codes, verdict in (
            ("learning", "Whether the reward rises, or why not.", LEARNING_CODES, learning_verdict(situation)),
            ("speed", "What the run waits for most.", SPEED_CODES, speed_verdict(situation)),
        ):
            levels: dict[str, int] = {code: _LEVELS[verdict.level] if code == verdict.code else 0 for code in codes}
            yield _gauges(f"run_{name}", documentation, "verdict", levels)
        if memory := snapshot.redis_memory:
            yield GaugeMetricFamily("penstock_redis_memory_used_bytes", "Memory of Redis.", value=memory.used_bytes)
            yield GaugeMetricFamily(
                "penstock_redis_memory_limit_bytes", "Memory that Redis may use.", value=memory.limit_bytes
            )

    def _parts(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        """State of the run's parts."""
        by_state: dict[str, int] = Tally(server.state for server in snapshot.servers)
        servers = {state: by_state.get(state, 0) for state in runs_pb2.Server.State.keys()[1:]}
        yield _gauges("rollout_servers", "Rollout servers by state.", "state", servers)
        yield GaugeMetricFamily(
            "penstock_rollout_servers_paused",
            "Rollout servers that lease nothing because everything that they tried failed.",
            value=snapshot.paused_servers,
        )
        yield GaugeMetricFamily(
            "penstock_rollout_servers_quarantined",
            "Rollout servers whose groups are not trained because their log-probs disagree with the learner's.",
            value=snapshot.quarantined_servers,
        )
        ages = snapshot.heartbeat_ages_s
        yield _gauges("heartbeat_age_seconds", "Time since the last heartbeat.", "component", ages)
        restarts = snapshot.restarts
        yield _counters("component_restarts", "Restarts of a component.", "component", restarts)
        yield _gauges("eval_score", "Mean reward of the newest finished evaluation.", "benchmark", snapshot.scores)

    def _limiter(self, stat: QueueStat) -> Iterator[Metric]:
        """Limits of admission and how close the run is to them."""
        for name, documentation, value in (
            ("staleness_limit_versions", "Largest staleness that admission allows.", self.limits.max_staleness),
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
    def __init__(self, registry: CollectorRegistry, limits: RunLimits) -> None:
        self.registry = registry
        self.requests = RequestSeries()
        registry.register(self.requests)
        info = Gauge("penstock_build_info", "Always 1.", ["placement", "version"], registry=registry)
        info.labels(limits.placement, __version__).set(1)
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.keys = Gauge("penstock_gateway_api_keys", "API keys that are valid.", registry=registry)
        self.broken_key_files = Gauge(
            "penstock_gateway_broken_key_files", "Files of API keys that cannot be used.", registry=registry
        )
        self.sessions = SessionCollector()
        registry.register(self.sessions)
        self.run = RunCollector(limits)
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
