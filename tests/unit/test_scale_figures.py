"""The figures of bench/scale.py: costs of a server, a group and a push, and how they grow with the fleet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from bench_modules import imported_bench

P99_S = {"lease": 0.001, "report": 0.002, "submit": 0.003, "generate": 0.004}


@pytest.fixture
def figures() -> Iterator[ModuleType]:
    """The module, which does not stay imported."""
    with imported_bench("scale_parts.figures") as [module]:
        yield module


def base(figures: ModuleType) -> Any:
    """A run without servers."""
    return figures.Costs(redis_s=0.02, gateway_s=0.1, learner_s=0.02, wall_s=2.0)


def sample(figures: ModuleType, num_servers: int, push_s: float = 0.001) -> Any:
    """A fleet whose servers cost Redis 0.2 ms a second, beside 0.01 that Redis always costs. Each of 100 groups costs
    1 ms, each of 10 submissions 2 ms of the gateway, each of 20 calls 3 ms, and a push `push_s` a server. The
    connections of a server that is silent cost Redis 0.01 ms a second."""
    idle_s = 0.01 + 0.0002 * num_servers

    def costs(wall_s: float, **spent: float) -> Any:
        idle = {"redis_s": idle_s * wall_s, "gateway_s": 0.05 * wall_s, "learner_s": idle_s * wall_s}
        return figures.Costs(**{part: idle[part] + spent.get(part, 0.0) for part in idle}, wall_s=wall_s)

    return figures.Sample(
        idle=costs(2.0), waiting=costs(4.0, redis_s=0.004 * num_servers),
        groups=costs(5.0, redis_s=0.1, learner_s=0.2), submissions=costs(3.0, gateway_s=0.02),
        silent=figures.Costs(redis_s=0.02 + 2e-5 * num_servers, gateway_s=0.1, wall_s=2.0),
        calls=figures.Costs(redis_s=0.042 + 4e-5 * num_servers, gateway_s=0.26, wall_s=4.0),
        pushes=figures.Costs(redis_s=5 * push_s * num_servers, learner_s=10 * push_s * num_servers, wall_s=50.0),
        num_groups=100, num_submissions=10, num_calls=20, num_pushes=5, p99_s=P99_S,
    )  # fmt: skip


def medians(figures: ModuleType, rounds: list[Any], num_servers: int, slower: float) -> dict[str, float]:
    found = figures.measurements(rounds, "fleet", num_servers, base(figures), slower)
    return {each.name.removeprefix("fleet: "): each.median for each in found}


def test_costs_are_those_of_the_thing_alone(figures: ModuleType) -> None:
    found = medians(figures, [sample(figures, 10)], 10, slower=5)
    assert found["Redis, CPU of a server"] == pytest.approx(5 * 200), "at the real interval of the reports"
    assert found["learner, CPU of a server"] == pytest.approx(200), "the learner is not slowed down"
    assert found["Redis, CPU of a server that waits"] == pytest.approx(5 * 1000)
    assert found["Redis, CPU of a group"] == pytest.approx(1000)
    assert found["learner, CPU of a group"] == pytest.approx(2000)
    assert found["gateway, CPU of a submission"] == pytest.approx(2000)
    assert found["gateway, CPU of a generate call"] == pytest.approx(3000)
    assert found["Redis, CPU of a generate call"] == pytest.approx(100)
    assert found["Redis, CPU of a push to a server"] == pytest.approx(1000)
    assert found["learner, CPU of a push to a server"] == pytest.approx(2000)
    assert found["a push without bytes, wall"] == 10.0
    assert found["membership (a report), wall, p99"] == 2.0


def test_a_cost_that_grows_with_the_fleet_misses_its_bar(figures: ModuleType) -> None:
    found = figures.measurements([sample(figures, 10)], "small", 10, base(figures), 5)
    found += figures.measurements([sample(figures, 1000, push_s=0.0012)], "large", 1000, base(figures), 5)
    bars = {bar.name: bar for bar in figures.fleet_bars(found, "small", "large")}
    missed = {name: bar.value for name, bar in bars.items() if not bar.ok}
    assert missed == {
        "Redis, CPU of a push to a server, large / small": pytest.approx(1.2),
        "learner, CPU of a push to a server, large / small": pytest.approx(1.2),
    }
    assert len(bars) == len(figures.JUDGED)


@pytest.mark.parametrize(("small", "large"), [(-0.1, 5.0), (5.0, -0.1), (0.0, 0.0)])
def test_a_cost_that_is_not_above_zero_is_no_success(figures: ModuleType, small: float, large: float) -> None:
    bar = figures.growth("cost", *(figures.Measurement("", "µs", [value]) for value in (small, large)))
    assert bar.value == math.inf and not bar.ok
