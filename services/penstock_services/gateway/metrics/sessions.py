"""Metrics of sessions and tasks: the calls that this gateway has recorded, and what Redis holds of the run."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.sessions.task_store import TaskStat
from penstock_services.gateway.sessions.traffic import SessionTraffic

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
