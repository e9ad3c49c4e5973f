"""Metrics of a run: its queue, its servers and its parts, read from Redis at each scrape."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.config.run import RunConfig
from penstock.replay.contract import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.run_state import RUN_STATES, RunFacts, RunState, has_learner, has_servers, run_state
from penstock.store.fleet import Fleet
from penstock.store.heartbeats import Heartbeats
from penstock.store.run_control import Orders, RunControl
from penstock.v1 import runs_pb2

_DEAD_REASONS = ("corrupt", "schema", "shape", "non_finite", "identity")
_EXPIRED_REASONS = ("stale", "no_spread", "quarantined", "reward_failed")
"""Known reasons. Their series start at 0, so that a first increase is seen."""


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
        replay, learner = config.replay, config.learner
        return cls(
            replay.capacity_bytes, replay.max_staleness, learner.placement, learner.num_steps, replay.lease_ttl_s
        )


@dataclass(frozen=True)
class RunSnapshot:
    stat: QueueStat
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)
    expired_reasons: dict[str, int] = field(default_factory=dict)
    servers_by_state: dict[str, int] = field(default_factory=dict)
    heartbeat_ages_s: dict[str, float] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    orders: Orders = Orders()
    has_servers: bool = False
    paused_servers: int = 0
    """Servers whose breaker is open: they lease no prompt because everything that they tried failed."""
    quarantined_servers: int = 0
    """Servers whose groups are not trained because their log-probs disagree with the learner's."""

    @classmethod
    async def take(
        cls, queue: RedisReplayQueue, fleet: Fleet, heartbeats: Heartbeats, control: RunControl
    ) -> RunSnapshot:
        stat = await queue.stat()
        dead, expired = await queue.dead_letter_reasons(), await queue.expired_reasons()
        servers = await fleet.servers()
        ages = await heartbeats.ages_s() | {server.server_id: server.heartbeat_age_ms / 1000 for server in servers}
        states: dict[str, int] = Tally(server.state for server in servers)
        restarts, scores = await heartbeats.restarts(), await queue.evaluation_scores()
        orders = await control.orders()
        known = {server.server_id for server in servers}
        paused = sum(breaker.server_id in known for breaker in await control.open_breakers())
        quarantined = len(known & (await control.quarantines()).keys())
        return cls(
            stat, dead, expired, states, ages, restarts, scores, orders, has_servers(servers), paused, quarantined
        )

    def run_state(self, limits: RunLimits) -> RunState:
        return run_state(
            RunFacts(
                step=self.stat.step,
                num_steps=limits.num_steps,
                term=self.stat.term,
                orders=self.orders,
                has_learner=has_learner(self.heartbeat_ages_s, limits.silence_s),
                has_servers=self.has_servers,
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
        yield from self._parts(self.snapshot)
        yield GaugeMetricFamily(
            "penstock_conservation_error",
            "admitted - trained - expired - dead_lettered - queued - in_flight; anything but 0 is a lost group.",
            value=stat.conservation_error,
        )

    def _parts(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        """State of the run and of its parts."""
        current, by_state = snapshot.run_state(self.limits), snapshot.servers_by_state
        states = {state.lower(): int(state == current) for state in RUN_STATES}
        yield _gauges("run_state", "1 for the current state of the run.", "state", states)
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
