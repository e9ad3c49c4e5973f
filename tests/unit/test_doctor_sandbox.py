"""`penstock doctor` says how this machine isolates the programs of code rewards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.config.rollout import CodeReward, RewardConfig
from penstock.config.run import RunConfig
from penstock_tools.doctor import examination as deployment


def config_with(reward: RewardConfig, folder: Path) -> RunConfig:
    plain = RunConfig.model_validate({"run_dir": str(folder), "model": {"path": str(folder)}})
    return plain.model_copy(update={"rollout": plain.rollout.model_copy(update={"reward": reward})})


def test_the_sandbox_is_tried(tmp_path: Path) -> None:
    (finding,) = deployment.check_sandbox(config_with(RewardConfig(), tmp_path))
    assert finding.check == "sandbox"
    assert "confined by" in finding.text if finding.level == "OK" else finding.advice


@pytest.mark.parametrize(("configured", "level"), [(True, "FAIL"), (False, "WARN")])
def test_a_machine_without_a_sandbox_fails_only_runs_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool, level: str
) -> None:
    asked: list[str] = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, 1, "this machine cannot isolate\n", "")

    monkeypatch.setattr(deployment.subprocess, "run", answer)
    reward = RewardConfig(default=CodeReward(confinement="bubblewrap")) if configured else RewardConfig()
    (finding,) = deployment.check_sandbox(config_with(reward, tmp_path))
    assert (finding.level, finding.text) == (level, "this machine cannot isolate")
    assert asked == ["bubblewrap" if configured else "auto"]
