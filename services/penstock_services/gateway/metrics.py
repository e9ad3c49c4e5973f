"""Metrics of the gateway: its own requests, and the run's queue and fleet as Redis shows them at scrape time."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.fleet import Fleet
from penstock.replay.contract import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.v1 import runs_pb2

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Observation:
    """What becomes known of a request while it is served."""

    route: str = "unmatched"
    """The template, never the path: labels stay few."""
    code: str = "INTERNAL"


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, capacity_bytes: int, max_staleness: int = 0) -> None:
        self.registry = registry
        self.requests = Counter(
            "penstock_gateway_requests", "Requests answered.", ["protocol", "route", "code"], registry=registry
        )
        self.duration = Histogram(
            "penstock_gateway_request_duration_seconds", "Time to answer.", ["protocol", "route"],
            buckets=_BUCKETS, registry=registry,
        )  # fmt: skip
        self.inflight = Gauge(
            "penstock_gateway_inflight_requests", "Requests being served.", ["protocol"], registry=registry
        )
        self.run = RunCollector(capacity_bytes, max_staleness)
        registry.register(self.run)

    @contextmanager
    def observe(self, protocol: str) -> Iterator[Observation]:
        seen = Observation()
        started = time.perf_counter()
        self.inflight.labels(protocol).inc()
        try:
            yield seen
        finally:
            self.inflight.labels(protocol).dec()
            self.requests.labels(protocol, seen.route, seen.code).inc()
            self.duration.labels(protocol, seen.route).observe(time.perf_counter() - started)

    def render(self, snapshot: RunSnapshot | None) -> bytes:
        """Prometheus text. Without a snapshot the run's series are absent, rather than stale."""
        self.run.snapshot = snapshot
        return generate_latest(self.registry)


@dataclass(frozen=True)
class RunSnapshot:
    stat: QueueStat
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)
    expired_reasons: dict[str, int] = field(default_factory=dict)
    servers_by_state: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def take(cls, queue: RedisReplayQueue, fleet: Fleet) -> RunSnapshot:
        stat = await queue.stat()
        dead, expired = await queue.dead_letter_reasons(), await queue.expired_reasons()
        return cls(stat, dead, expired, dict(Tally(server.state for server in await fleet.servers())))


class RunCollector(Collector):
    """Series of the run. `queue="prompts"` waits for rollout servers, `queue="groups"` for the learner."""

    def __init__(self, capacity_bytes: int, max_staleness: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_staleness = max_staleness
        self.snapshot: RunSnapshot | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        stat = self.snapshot.stat
        ready = stat.queued - stat.delivered
        yield _by_queue("depth", "Entries that wait.", prompts=stat.pending, groups=ready)
        yield _by_queue("pending", "Handed out, not yet settled.", prompts=stat.in_flight, groups=stat.delivered)
        yield _by_queue("bytes", "Bytes of waiting groups.", groups=stat.queued_bytes)
        yield _by_queue("capacity_bytes", "Bytes at which producers wait.", groups=self.capacity_bytes)
        for name in ("admitted", "inserted", "trained", "redelivered", "reclaimed"):
            yield CounterMetricFamily(f"penstock_{name}", f"Groups {name}.", value=getattr(stat, name))
        yield _by_reason("dead_lettered", "Groups put aside as unusable.", self.snapshot.dead_letter_reasons)
        yield _by_reason("expired", "Groups dropped: too old, or not worth training.", self.snapshot.expired_reasons)
        yield from self._limiter(stat)
        yield GaugeMetricFamily(
            "penstock_conservation_error",
            "admitted - trained - expired - dead_lettered - queued - in_flight; anything but 0 is a lost group.",
            value=stat.conservation_error,
        )
        servers = GaugeMetricFamily("penstock_rollout_servers", "Rollout servers by state.", labels=["state"])
        for state in runs_pb2.Server.State.keys()[1:]:
            servers.add_metric([state], self.snapshot.servers_by_state.get(state, 0))
        yield servers

    def _limiter(self, stat: QueueStat) -> Iterator[Metric]:
        """Admission, as staleness and as samples per insert."""
        for name, documentation, value in (
            ("staleness_limit_versions", "Bound of staleness that admission holds.", self.max_staleness),
            ("queue_admission_limit", "What trained, queued and in flight may add up to.", stat.admission_limit),
            ("queue_admission_room", "Prompts that may be admitted now.", stat.admission_room),
            ("queue_samples_per_insert", "Groups trained for each group handed in.", stat.samples_per_insert),
        ):
            yield GaugeMetricFamily(f"penstock_{name}", documentation, value=value)


def _by_reason(name: str, documentation: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"penstock_{name}", documentation, labels=["reason"])
    for reason, count in sorted(counts.items()):
        family.add_metric([reason], count)
    return family


def _by_queue(name: str, documentation: str, **values: int) -> Metric:
    family = GaugeMetricFamily(f"penstock_queue_{name}", documentation, labels=["queue"])
    for queue, value in values.items():
        family.add_metric([queue], value)
    return family
