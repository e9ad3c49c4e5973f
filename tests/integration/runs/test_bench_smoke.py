"""Every benchmark measures: `--smoke` takes the smallest sizes and one round, and its figures go to a temporary folder.

Those that start a whole run follow the demo of test_demo.py instead.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import bench_smoke
from support.bench_smoke import BENCH, FOLLOWERS, NEEDS, PROGRAMS, SmokeRun


def test_every_benchmark_is_a_program() -> None:
    assert len(PROGRAMS) > 15
    assert set(FOLLOWERS) < set(PROGRAMS) and set(NEEDS) < set(PROGRAMS)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program not in FOLLOWERS])
def test_a_smoke_run_of_a_benchmark_measures(program: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
    SmokeRun(program, tmp_path).finish()
    assert before == {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("parts", ["weights,rollout", "--check codec,checkpoints,agents,scale,simulate"])
def test_the_other_parts_of_a_comparison_measure(parts: str, tmp_path: Path) -> None:
    *words, names = parts.split()
    SmokeRun("against.py", tmp_path, arguments=[*words, "--parts", names]).finish()


def test_a_program_that_could_have_measured_fails_without_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def __init__(self, _: Path, __: list[str], output: Path, *___: object) -> None:
            output.write_text("TRL is not installed, so its step is skipped")

        def wait(self, _: float) -> int:
            return 0

        def kill(self) -> None: ...

    monkeypatch.setattr(bench_smoke, "ForkedProcess", Ended)
    with pytest.raises(AssertionError, match="nothing was measured: TRL is not installed"):
        SmokeRun("gpu/learner.py", tmp_path).finish()


def test_help_describes_a_benchmark_and_runs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "codec.py"), "--help"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "Compares two encodings of a group" in done.stdout
    assert "groups/s" not in done.stdout
