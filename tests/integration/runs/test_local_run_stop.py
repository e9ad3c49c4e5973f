"""A local run that an operator stops ends at once, and says that it is paused when it is started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main as penstock
from support.processes import until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "arithmetic"
WORDS = (
    "--run", "stopped", "--rollout.engine.name", "torch", "--replay.groups_per_step", "4",
    "--learner.policy.num_ranks", "1", "--learner.num_steps", "100000",
    "--dataset.file", f"{EXAMPLE}/train.parquet", "--dataset.max_tokens", "8", "--dataset.epochs", "0",
    "--dataset.validation", f"{{file: {EXAMPLE}/heldout.parquet, every_steps: 1, max_tokens: 8}}",
)  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.long  # test_doc_commands.py stops a run in the same way
def test_a_stopped_run_ends_and_stays_paused(tmp_path: Path) -> None:
    folder, log = tmp_path / "stopped", tmp_path / "log"
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(EXAMPLE / "demo.yaml"), "--run_dir", str(tmp_path)]
    for is_again in (False, True):
        with log.open("w") as output:
            process = subprocess.Popen([*command, *WORDS], cwd=ROOT, stdout=output, stderr=output)
        try:
            if is_again:
                until(
                    lambda: "the run is paused by an operator; `penstock runs resume" in log.read_text(),
                    "the line that says so",
                )
                process.terminate()
            else:
                until(lambda: metrics.exists() and metrics.stat().st_size > 0, "a step")
                assert penstock(["runs", "stop", "--run-dir", str(folder)]) == 0
            assert process.wait(120) == 0, log.read_text()
            if not is_again:
                for phase in (
                    "learner: starting or joining Ray",
                    "learner: waiting for the first batch",
                    "learner: training",
                ):
                    assert phase in log.read_text()
                assert "rollout-0: serving (joining the fleet and waiting for the current weights: " in log.read_text()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(120)
    assert "stopping" in log.read_text()
