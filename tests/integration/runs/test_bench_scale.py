"""`make bench-scale` runs through all its phases, with a small fleet and a small queue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench" / "scale.py"


def test_every_phase_is_measured_with_a_small_fleet(tmp_path: Path) -> None:
    sizes = ["--servers", "2", "--prompts", "20000", "--rounds", "1"]
    times = ["--seconds", "1.5", "--slower", "0.5", "--generate-s", "0.3"]
    command = [sys.executable, str(BENCH), *sizes, *times, "--results", str(tmp_path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "scale.json").exists(), result.stdout + result.stderr
    assert result.returncode in (0, 1), "a bar may be missed on a busy machine"
    measured = {
        each["name"]: each["median"] for each in json.loads((tmp_path / "scale.json").read_text())["measurements"]
    }
    for name in ("Redis, CPU of a push to a server", "learner, CPU of a push to a server", "groups"):
        assert measured[f"2 servers: {name}"] > 0
    assert "2 servers: gateway, CPU of a generate call" in measured
    assert 100 < measured["20,000 prompts: Redis, memory of a prompt"] < 2000
