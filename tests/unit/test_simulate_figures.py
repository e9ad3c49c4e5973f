"""What bench/simulate.py is calibrated by, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench_modules import imported_bench


@pytest.fixture
def bench() -> Iterator[Any]:
    with imported_bench("simulate") as [module]:
        yield module


def test_it_keeps_to_closed_forms_and_to_the_measured_steps(bench: Any) -> None:
    assert [bar.name for bar in (*bench.check_limits(), bench.check_fit()) if not bar.ok] == []


def test_the_step_of_7b_is_predicted_and_not_fitted(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, figure = bench.Decoding.fitted(), bench.figure
    monkeypatch.setattr(bench, "figure", lambda file, name: figure(file, name) * (2 if "7b" in name else 1))
    assert bench.Decoding.fitted() == before
    assert not bench.check_fit().ok


def test_both_sides_have_the_same_gpus_engine_and_data(bench: Any) -> None:
    for setting in bench.SETTINGS:
        synchronous, divided = bench.fleet_of(setting, 64, 64, 0), bench.fleet_of(setting, 48, 16, 2)
        for name in ("samples_at_once", "mean_tokens", "max_tokens", "num_samples", "groups_per_step", "seed"):
            assert getattr(synchronous, name) == getattr(divided, name), name
        assert synchronous.step_s_of(100) == divided.step_s_of(100)
        assert divided.train_s_of(1e6) >= 2 * synchronous.train_s_of(1e6), "a quarter of the GPUs trains"


def test_an_ideal_engine_is_faster_and_what_is_varied_differs(bench: Any) -> None:
    setting = bench.SETTINGS[0]
    ideal = bench.fleet_of(replace(setting, has_ideal_engine=True), 64, 64, 0)
    assert ideal.step_s_of(64) < bench.fleet_of(setting, 64, 64, 0).step_s_of(64)
    assert len({setting, *bench.variants_of(setting).values()}) == 4
