"""The time in which an engine had something to generate."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.config.rollout import EngineConfig
from penstock_rollout.engines import engine
from penstock_rollout.engines.torch.engine import TorchEngine
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


def test_requests_that_overlap_count_once_and_gaps_do_not_count(clock: Clock, tmp_path: Path) -> None:
    engine = TorchEngine(EngineConfig(), tmp_path, "float32", 0)
    first, second, third = (engine._serving(name) for name in "abc")
    clock.now += 5
    assert engine._generating_s == 0, "nothing has been asked for"
    first.__enter__()
    clock.now += 2
    second.__enter__()
    clock.now += 3
    assert engine._generating_s == 5, "a request that runs counts at once"
    first.__exit__(None, None, None)
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 10
    assert engine._generating_s == 6
    with third:
        clock.now += 4
    assert engine._generating_s == 10


def test_the_metric_asks_the_engine_when_it_is_scraped() -> None:
    registry, seconds = CollectorRegistry(), [3.0]
    RolloutMetrics(registry).generating.seconds = lambda: seconds[0]
    assert registry.get_sample_value("penstock_rollout_generating_seconds_total") == 3
    seconds[0] = 8.0
    assert registry.get_sample_value("penstock_rollout_generating_seconds_total") == 8
