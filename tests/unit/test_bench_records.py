"""What benchmarks write about the parts that were measured before."""

from __future__ import annotations

import json
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
