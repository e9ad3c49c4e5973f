"""Smoke runs of the benchmarks: the smallest sizes, one round, on a CPU. They judge nothing."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.forked_process import ForkedProcess

BENCH = Path(__file__).parents[2] / "bench"
PROGRAMS = sorted(
    path.relative_to(BENCH).as_posix() for path in (*BENCH.glob("*.py"), *BENCH.glob("gpu/*.py"))
    if '\nif __name__ == "__main__":' in path.read_text()
)  # fmt: skip
FOLLOWERS = ("async_sync.py", "gpu/cold_start.py", "gpu/whole_run.py", "soak.py", "trl_demo.py")
"""Programs that start a whole run. In a smoke run they follow a run that the test has started."""
FINISH_S = 600.0
NEEDS = {"rollout.py": "vllm"}
"""Packages without which a program measures nothing. Others skip a part, and still write what they measured."""
IMPORTED = (
    "transformers.models.qwen2.modeling_qwen2", "penstock_learner.roles.policy", "penstock_rollout.engines.factory",
)  # fmt: skip
"""What takes longest to import, and several programs need. They are forked from a process that has it."""


class SmokeRun:
    """One program in its own process. `finish` returns what it wrote."""

    def __init__(self, program: str, folder: Path, run: Path | None = None, arguments: Sequence[str] = ()) -> None:
        self.program = program
        self.results = folder / f"results of {program.replace('/', ' ')}"
        self.results.mkdir()
        self.output = self.results / "output.txt"
        environment = {
            "PYTHONPATH": f"{BENCH}:{os.environ['PYTHONPATH']}", "OMP_NUM_THREADS": "1",
            "PENSTOCK_BENCH_RESULTS": str(self.results),
        }  # fmt: skip
        if run is not None:
            environment["PENSTOCK_BENCH_RUN"] = str(run)
        self.process = ForkedProcess(BENCH / program, ["--smoke", *arguments], self.output, environment, IMPORTED)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the program. Its results must have figures and bars."""
        try:
            code = self.process.wait(FINISH_S)
        finally:
            self.end()
        text = self.output.read_text()
        assert code == 0, text[-4000:]
        files = list(self.results.glob("*.json"))
        if not files:
            needed = NEEDS.get(self.program)
            assert needed and importlib.util.find_spec(needed) is None, f"nothing was measured: {text[-2000:]}"
            return {}
        (file,) = files
        results: dict[str, Any] = json.loads(file.read_text())
        assert results["bars"], results
        assert results.get("measurements") or results.get("account"), results
        assert results["commit"] and results["machine"]
        return results

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
