"""A run of one epoch: it trains on the last, smaller batch, validates the last policy, and finishes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "arithmetic"
WORDS = (
    "--run", "epoch", "--rollout.engine.name", "torch", "--replay.groups_per_step", "8", "--learner.num_steps", "0",
    "--learner.policy.num_ranks", "1", "--dataset.max_tokens", "8",
)  # fmt: skip


def up(tmp_path: Path, *words: str) -> str:
    """What `penstock up` says about a run that ends by itself."""
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(EXAMPLE / "demo.yaml"), "--run_dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *WORDS, *words],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(700)
def test_one_epoch_with_a_remainder_ends_well_and_more_epochs_continue(tmp_path: Path) -> None:
    data, folder = tmp_path / "train.jsonl", tmp_path / "epoch"
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    validation = f"{{file: {data}, every_steps: 100, max_tokens: 8, before_train: false}}"
    words = ("--dataset.file", str(data), "--dataset.validation", validation)
    said = up(tmp_path, *words, "--dataset.epochs", "1")
    assert "plan: 3 steps of 8 prompts from 1 epoch of 20 prompts; the last step has 4" in said
    assert "validation at step 3: " in said and "validation at step 0: " not in said
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["num_sequences"] for step in steps] == [64, 64, 32]
    assert sorted((folder / "checkpoints").glob("term-*-step-*3")), "the last step has a checkpoint"
    said = up(tmp_path, *words, "--dataset.epochs", "2")
    assert "plan: 5 steps of 8 prompts from 2 epochs of 20 prompts" in said and "validation at step 6: " in said
    said = up(tmp_path, *words, "--dataset.validation.only", "true", "--dataset.validation.every_steps", "6")
    assert "plan: validate and finish" in said and "validation at step 6: " in said
