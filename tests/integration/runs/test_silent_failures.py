"""`penstock up` on runs that cannot learn: it says why, at once, and does not go on in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client import SyncPenstockClient
from support.processes import until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "arithmetic"
WORDS = (
    "--run", "silent", "--rollout.engine.name", "torch", "--replay.groups_per_step", "4",
    "--learner.policy.num_ranks", "1", "--learner.num_steps", "1000", "--dataset.max_tokens", "8",
)  # fmt: skip


def up(tmp_path: Path, log: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(EXAMPLE / "demo.yaml"), "--run_dir", str(tmp_path)]
    with log.open("w") as output:
        return subprocess.Popen([*command, *WORDS, *words], cwd=ROOT, stdout=output, stderr=output)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_reward_that_always_fails_is_shown_and_pauses_the_run(tmp_path: Path) -> None:
    reward, log = tmp_path / "reward.py", tmp_path / "log"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}['answer']\n"
    )
    process = up(
        tmp_path, log, "--rollout.reward.function_file", str(reward), "--dataset.file", f"{EXAMPLE}/train.parquet",
        "--dataset.epochs", "0",
    )  # fmt: skip
    try:
        until(lambda: "the run is paused: the reward failed on" in log.read_text(), "the pause", timeout_s=240)
        said = log.read_text()
        assert said.count("KeyError: 'answer'\n") == 1, "the traceback of the first failure, once"
        assert f'    File "{reward}", line 2' in said
        for phase in ("learner: starting or joining Ray", "learner: loading the model", "rollout-0: serving"):
            assert phase in said
        with SyncPenstockClient.from_run_dir(tmp_path / "silent") as client:
            run = client.get_run()
        assert (run.state, run.step, run.policy_version) == ("PAUSED", 0, 0), "nothing was trained on error_value"
        assert "the reward failed on" in run.detail
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_dataset_of_prompts_that_are_too_long_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    data, log = tmp_path / "train.jsonl", tmp_path / "log"
    data.write_text("".join(json.dumps({"prompt": "1+" * 100 + f"{number}"}) + "\n" for number in range(20)))
    process = up(tmp_path, log, "--dataset.file", str(data))
    try:
        assert process.wait(240) == 2, log.read_text()
        said = log.read_text()
        assert "failed (prompt_too_long): messages: " in said
        assert "all 20 prompts of an epoch were dead-lettered (20 with prompt_too_long)" in said
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_reward_that_never_differs_is_reported_with_the_cause(tmp_path: Path) -> None:
    reward, log = tmp_path / "reward.py", tmp_path / "log"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n")
    process = up(
        tmp_path, log, "--rollout.reward.function_file", str(reward), "--dataset.file", f"{EXAMPLE}/train.parquet",
        "--dataset.epochs", "0",
    )  # fmt: skip
    try:
        until(lambda: "learning: reward 0.5 over " in log.read_text(), "the finding", timeout_s=240)
        assert "100% of the groups have no spread in reward, so they train nothing; give easier or" in log.read_text()
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(60)
