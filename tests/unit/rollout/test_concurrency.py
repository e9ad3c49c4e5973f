"""The concurrency limit, driven with given engine stats and times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from penstock.config.rollout import AdaptiveConcurrencyConfig
from penstock_rollout.engines.engine import EngineStats
from penstock_rollout.groups.producer import ConcurrencyLimit

CONFIG = AdaptiveConcurrencyConfig(max_kv_usage=0.9, max_queue_s=5)
IDLE = EngineStats(running_requests=10, waiting_requests=0, kv_cache_usage=0.5)
FEW = EngineStats(running_requests=10, waiting_requests=1, kv_cache_usage=0.5)
"""Less than half the reserve waits."""


def waiting(running: int, waiting: int, kv: float = 0.5) -> EngineStats:
    return EngineStats(running, waiting, kv)


def drive(limit: ConcurrencyLimit, start_s: int, end_s: int, stats: EngineStats, groups: int | None = None) -> int:
    """Observe once a second. By default as many groups run as the limit allows."""
    for now_s in range(start_s, end_s):
        limit.observe(now_s, stats, limit.limit if groups is None else groups)
    return limit.limit


def test_it_starts_at_the_maximum_and_stays_there_while_nothing_waits() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 100, IDLE) == 64


def test_requests_that_wait_for_a_moment_change_nothing() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    for start_s in range(0, 100, 5):
        drive(limit, start_s, start_s + 4, waiting(10, 30))
        drive(limit, start_s + 4, start_s + 5, IDLE)
    assert limit.limit == 64


def test_a_lasting_queue_lowers_it_by_the_share_past_the_reserve() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 5, waiting(30, 30)) == 64
    assert drive(limit, 5, 6, waiting(30, 30)) == 48, "30 running and a reserve of 15 are 45 of the 60 requests"


def test_a_reserve_that_waits_is_left_alone() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 100, waiting(30, 15)) == 64
    drive(limit, 100, 101, waiting(30, 10, kv=1.0))
    assert drive(limit, 101, 150, waiting(30, 8)) == 48, "it does not rise while half the reserve waits"


def test_a_full_cache_lowers_it_at_once_but_not_again_before_it_had_effect() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 5, waiting(30, 10, kv=0.95)) == 48
    assert drive(limit, 5, 10, waiting(30, 10, kv=0.95)) == 36


def test_a_full_cache_where_nothing_waits_is_well_used() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 50, EngineStats(10, 0, 0.99)) == 64


def test_it_falls_to_half_at_most_and_never_below_one() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 1, waiting(0, 1000, kv=1.0)) == 32
    assert drive(limit, 1, 200, waiting(0, 1000, kv=1.0)) == 1


def test_it_falls_from_what_runs_when_that_is_less_than_the_limit() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    assert drive(limit, 0, 1, waiting(30, 10, kv=1.0), groups=20) == 15


def test_it_rises_by_a_sixteenth_only_while_it_binds() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    drive(limit, 0, 1, waiting(30, 10, kv=1.0))
    assert drive(limit, 1, 20, FEW, groups=10) == 48
    assert drive(limit, 20, 22, FEW) == 54
    assert drive(limit, 22, 28, waiting(30, 0, kv=0.92)) == 54, "no more while the cache is nearly full"
    assert drive(limit, 28, 100, FEW) == 64


def test_it_rises_by_a_quarter_while_nothing_waits() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    drive(limit, 0, 1, waiting(0, 1000, kv=1.0))
    assert [drive(limit, second, second + 1, IDLE) for second in range(1, 5)] == [40, 50, 62, 64]


def test_observations_within_one_second_count_once() -> None:
    limit = ConcurrencyLimit(CONFIG, 64)
    drive(limit, 0, 1, waiting(30, 10, kv=1.0))
    for tick in range(100):
        limit.observe(1 + tick / 100, FEW, 48)
    assert limit.limit == 51


def test_switched_off_it_never_moves() -> None:
    limit = ConcurrencyLimit(AdaptiveConcurrencyConfig(enabled=False), 64)
    assert drive(limit, 0, 100, waiting(0, 1000, kv=1.0)) == 64


@dataclass
class SimulatedEngine:
    """Decodes `places` requests at once. A group has 8 requests."""

    places: int

    def drive(self, limit: ConcurrencyLimit, seconds: int) -> list[int]:
        limits = []
        for now_s in range(seconds):
            requests = limit.limit * 8
            running = min(requests, self.places)
            limits.append(limit.observe(now_s, waiting(running, requests - running), limit.limit))
        return limits


def test_it_converges_where_the_engine_is_full_and_a_reserve_waits() -> None:
    limits = SimulatedEngine(places=160).drive(ConcurrencyLimit(CONFIG, 64), 300)
    converged = limits[100:]
    assert min(converged) >= 20, "160 places are 20 groups: fewer would leave the engine idle"
    assert max(converged) <= 32


@pytest.mark.parametrize("maximum", [24, 64, 512])
def test_an_engine_stays_full_though_groups_end_unevenly(maximum: int) -> None:
    """The engine has 64 rows. Samples take 1 to 12 s, and a group's place is free when its last sample is done."""
    random, limit = np.random.default_rng(0), ConcurrencyLimit(CONFIG, maximum)
    groups: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    queue: list[int] = []
    busy, queued = [], []
    for tick in range(8000):
        now_s = tick / 10
        for _, group in (ended := [entry for entry in running if entry[0] <= now_s]):
            groups[group] -= 1
        running = [entry for entry in running if entry not in ended]
        groups = {group: left for group, left in groups.items() if left}
        limit.observe(now_s, waiting(len(running), len(queue)), len(groups))
        for number in range(limit.limit - len(groups)):
            groups[tick * 1000 + number] = 8
            queue += [tick * 1000 + number] * 8
        while queue and len(running) < 64:
            running.append((now_s + min(12.0, 1 + random.exponential(4)), queue.pop(0)))
        busy.append(len(running))
        queued.append(len(queue))
    assert np.mean(busy[4500:]) > 0.985 * 64, "hardly any row is idle"
    assert np.mean(queued[4500:]) < 64, "no more requests wait than run"
