"""The simulation of lengths with a long tail behind bench/simulate.py, against closed forms."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from penstock.errors import InvalidInput

FILE = Path(__file__).parents[2] / "bench" / "simulate_parts" / "token_simulation.py"
module = runpy.run_path(str(FILE))
TokenFleet, lengths, simulate_tokens = module["TokenFleet"], module["lengths"], module["simulate_tokens"]

TOKEN_S = 0.02
FLEET = TokenFleet(
    num_servers=8, samples_at_once=64, step_s_of=lambda num_running: TOKEN_S, mean_tokens=1000, length_variation=0.0,
    max_tokens=math.inf, num_samples=8, groups_per_step=64, max_staleness=0, train_s_of=lambda tokens: 12.0,
)  # fmt: skip
"""All 512 samples of a step are decoded at once, in 20 s."""


def test_a_synchronous_step_is_generation_plus_push_plus_training() -> None:
    forecast = simulate_tokens(replace(FLEET, push_s=3.0))
    assert forecast.step_s == pytest.approx(20 + 3 + 12)
    assert forecast.wait_share == pytest.approx(23 / 35)
    assert forecast.decoding_share == pytest.approx(20 / 35, rel=0.05)
    assert (forecast.staleness_mean, forecast.staleness_max) == (0, 0)
    assert forecast.tokens_per_s == pytest.approx(512 * 1000 / 35)


@pytest.mark.parametrize("train_s", [5.0, 20.0, 40.0])
def test_with_equal_lengths_overlap_gives_its_ideal(train_s: float) -> None:
    synchronous = replace(FLEET, train_s_of=lambda tokens: train_s, num_steps=60)
    overlapped = simulate_tokens(replace(synchronous, max_staleness=2))
    assert overlapped.step_s == pytest.approx(max(20.0, train_s), rel=0.02)
    speedup = simulate_tokens(synchronous).step_s / overlapped.step_s
    assert speedup == pytest.approx((20 + train_s) / max(20.0, train_s), rel=0.02)
    assert overlapped.staleness_max <= 2


def test_a_server_with_fewer_samples_decodes_faster() -> None:
    """Two samples of 1000 and 3000 tokens: 1000 tokens of both, then 2000 of one alone, at twice the speed."""
    fleet = replace(
        FLEET, num_servers=1, samples_at_once=2, num_samples=2, groups_per_step=1, num_steps=2,
        step_s_of=lambda num_running: 0.01 * num_running,
    )  # fmt: skip
    forecast = simulate_tokens(replace(fleet, length_variation=1.0, max_tokens=3000, num_steps=200))
    source = lengths(np.random.default_rng(1), replace(fleet, length_variation=1.0, max_tokens=3000))
    drawn = [next(source) for _ in range(400)]
    pairs = [sorted(drawn[index : index + 2]) for index in range(0, 400, 2)]
    expected = mean(0.02 * short + 0.01 * (long - short) for short, long in pairs[2:])
    assert forecast.step_s == pytest.approx(expected + 12)


def test_more_samples_than_fit_are_generated_in_turns() -> None:
    forecast = simulate_tokens(replace(FLEET, num_servers=4))
    assert forecast.step_s == pytest.approx(2 * 20 + 12)


def test_a_pause_delays_what_is_being_decoded() -> None:
    busy = replace(FLEET, max_staleness=4, train_s_of=lambda tokens: 1.0, num_steps=60)
    assert simulate_tokens(replace(busy, pause_s=2.0)).step_s == pytest.approx(22, rel=0.02)
    assert simulate_tokens(busy).step_s == pytest.approx(20, rel=0.02)


def test_a_long_tail_costs_synchronous_training_more() -> None:
    tailed = replace(FLEET, length_variation=1.3, max_tokens=8000, num_steps=40)
    speedups = [
        simulate_tokens(each).step_s / simulate_tokens(replace(each, max_staleness=4)).step_s
        for each in (FLEET, tailed)
    ]
    assert speedups[1] > 1.5 * speedups[0]


def test_lengths_have_the_mean_and_are_cut() -> None:
    fleet = replace(FLEET, length_variation=0.5, max_tokens=2500)
    source = lengths(np.random.default_rng(3), fleet)
    drawn = [next(source) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(1000, rel=0.03) and max(drawn) == 2500
    assert simulate_tokens(fleet) == simulate_tokens(fleet), "the same seed, the same run"


def test_a_group_that_fits_no_server_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be at least num_samples, 8"):
        simulate_tokens(replace(FLEET, samples_at_once=4))
    with pytest.raises(InvalidInput, match="num_servers"):
        simulate_tokens(replace(FLEET, num_servers=0))
