"""Every benchmark runs: `--smoke` takes the smallest sizes and one round, judges nothing and writes nothing.

What needs a GPU or vLLM ends where it would start it, so what comes after that is not covered here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
PROGRAMS = sorted(
    path.relative_to(BENCH).as_posix() for path in (*BENCH.glob("*.py"), *BENCH.glob("gpu/*.py"))
    if '\nif __name__ == "__main__":' in path.read_text()
)  # fmt: skip


def test_every_benchmark_is_a_program() -> None:
    assert len(PROGRAMS) > 15


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_smoke_run_of_a_benchmark_ends_well(program: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
    environment = os.environ | {"PYTHONPATH": f"{BENCH}:{os.environ['PYTHONPATH']}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH / program), "--smoke"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert before == {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
