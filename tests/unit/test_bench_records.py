"""What benchmarks write about the parts that were measured before."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/harness.py, with its results in a folder of the test."""
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return harness


def test_a_part_that_is_measured_later_keeps_the_records_of_the_others(
    harness: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(part: str, ratio: float, commit: str) -> bool:
        monkeypatch.setenv("PENSTOCK_BENCH_COMMIT", commit)
        name = f"{part}: this tree / base"
        results = harness.Results([harness.Measurement(name, "", [ratio])], [harness.Bar(name, ratio, 0.9)])
        is_met: bool = harness.record_part("against", "a title", part, results, base="b0", load="0.5")
        return is_met

    assert measure("queue", 0.5, "c1") is False
    assert measure("demo", 1.0, "c2") is False, "the bar of the queue is still not met"
    assert measure("queue", 0.95, "c3") is True
    written = json.loads((tmp_path / "against.json").read_text())
    assert {bar["name"]: bar["value"] for bar in written["bars"]} == {
        "demo: this tree / base": 1.0, "queue: this tree / base": 0.95,
    }  # fmt: skip
    assert {entry["name"] for entry in written["measurements"]} == {bar["name"] for bar in written["bars"]}
    assert {part: facts["commit"] for part, facts in written["parts"].items()} == {"queue": "c3", "demo": "c2"}
    assert all(
        facts["base"] == "b0" and facts["load"] == "0.5" and facts["date"] for facts in written["parts"].values()
    )


def test_a_demo_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import against

    monkeypatch.setattr(against, "DEMO", "import time; time.sleep(300)")
    monkeypatch.setattr(against, "DEMO_S", 1.0)
    with pytest.raises(SystemExit, match="the demo of base took longer than 1 s"):
        against.run_demo(against.Tree("base", BENCH.parent, tmp_path), 1)


def test_the_short_form_refuses_a_loss_beyond_the_spread(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import against

    def is_met(*rates: float) -> bool:
        measured = {against.BASE: [100.0] * len(rates), against.THIS: list(rates)}
        by = {name: harness.Measurement(name, "", values) for name, values in measured.items()}
        (bar,) = against.judge("queue", {"groups/s": by}).bars
        return bool(bar.ok)

    assert is_met(93, 92, 94, 91, 93) and is_met(60, 95, 70, 101, 80), "a small loss, and one within the spread"
    assert not is_met(88, 87, 89, 86, 88)


def test_each_kind_of_machine_has_its_results_and_its_column(
    harness: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, ratio in (("x86_64", 0.8), ("aarch64", 0.7), ("x86_64", 0.9)):
        monkeypatch.setattr("platform.machine", lambda kind=kind: kind)
        monkeypatch.setenv("PENSTOCK_BENCH_COMMIT", f"c{ratio}")
        harness.report("codec", "a title", [], [harness.Bar("encode, ours / JSON", ratio, 0.75)])
    assert {path.name for path in tmp_path.iterdir()} == {"codec.json", "codec.aarch64.json"}
    pages = runpy.run_path(str(BENCH.parent / "docs" / "make_benchmarks.py"))
    pages["_section"].__globals__["RESULTS"] = tmp_path
    page = pages["_section"]("codec")
    assert "`c0.9`" in page and "`c0.7`" in page and "| x86_64 | aarch64 | goal |" in page
    assert "| encode, ours / JSON | 0.9 | 0.7, **not met** | ≥ 0.75 |" in page
