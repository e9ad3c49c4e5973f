"""The time in which an engine had something to generate."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from penstock_rollout.engines import engine
from penstock_rollout.engines.engine import GeneratingTime
from penstock_rollout.metrics import RolloutMetrics


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)
    return clock


def test_requests_that_overlap_count_once_and_gaps_do_not_count(clock: Clock) -> None:
    generating = GeneratingTime()
    clock.now += 5
    assert generating.seconds == 0, "nothing has been asked for"
    generating.begin()
    clock.now += 2
    generating.begin()
    clock.now += 3
    assert generating.seconds == 5, "a request that runs counts at once"
    generating.end()
    clock.now += 1
    generating.end()
    clock.now += 10
    assert generating.seconds == 6
    generating.begin()
    clock.now += 4
    generating.end()
    assert generating.seconds == 10


def test_the_metric_asks_the_engine_when_it_is_scraped() -> None:
    registry, seconds = CollectorRegistry(), [3.0]
    RolloutMetrics(registry).generating.seconds = lambda: seconds[0]
    assert registry.get_sample_value("penstock_rollout_generating_seconds_total") == 3
    seconds[0] = 8.0
    assert registry.get_sample_value("penstock_rollout_generating_seconds_total") == 8
