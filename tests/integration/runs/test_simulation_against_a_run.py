"""The forecast of `penstock simulate` is compared with a real run on this machine: once the learner waits for servers,
and once the servers wait for the learner."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from penstock.cli.main import main
from support.fleet_runs import FleetRun, fleet_config
from support.redis_server import RedisProcess

NUM_STEPS = 40
SLOW_REWARD = """import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return float(solution_str.strip() == str(ground_truth))
"""


def metrics_of(folder: Path, name: str) -> str:
    place = json.loads((folder / f"{name}.json").read_text())
    with urllib.request.urlopen(f"http://{place['host']}:{place['metrics_port']}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def mean_push_s(text: str) -> float:
    """Sum of the phases that follow each other. The phases of the members lie within these."""
    sums = re.findall(r'^penstock_weight_sync_duration_seconds_sum\{phase="(\w+)",.*\} (\S+)$', text, re.M)
    counts = re.findall(r'^penstock_weight_sync_duration_seconds_count\{phase="(\w+)",.*\} (\S+)$', text, re.M)
    num_pushes = max(float(count) for _, count in counts)
    phases = ("announce", "transfer", "commit")
    return sum(float(value) for phase, value in sums if phase in phases) / num_pushes


@pytest.mark.long
@pytest.mark.parametrize("is_slow", [True, False], ids=["waiting learner", "waiting servers"])
def test_the_forecast_is_near_what_the_run_measured(
    is_slow: bool, tmp_path: Path, redis_process: RedisProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fleet_config(tmp_path, redis_process.url, f"simulated-{is_slow}".lower(), transport="shm")
    engine = config.rollout.engine.model_copy(update={"name": "torch"})
    rollout = config.rollout.model_copy(update={"max_concurrent_groups": 2 if is_slow else 12, "engine": engine})
    if is_slow:
        (tmp_path / "reward.py").write_text(SLOW_REWARD)
        reward = rollout.reward.model_copy(update={"function_file": tmp_path / "reward.py"})
        rollout = rollout.model_copy(update={"reward": reward})
    with FleetRun(config.model_copy(update={"rollout": rollout}), redis_process.url) as run:
        folder = run.config.folder
        run.start_server("server")
        run.start_learner()
        run.until(lambda: num_steps(folder) >= NUM_STEPS, f"{NUM_STEPS} steps", timeout_s=200)
        (tmp_path / "metrics.txt").write_text(metrics_of(folder, "server"))
        push_s = mean_push_s(metrics_of(folder, "learner"))
    words = ["--run-dir", str(folder), "--rollout-metrics", str(tmp_path / "metrics.txt"), "--push-s", str(push_s)]
    assert main(["simulate", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    forecast, measured = result["forecast"], result["measured"]
    print(json.dumps(result, indent=1))
    assert forecast["idle_share"] == pytest.approx(measured["idle_share"], abs=0.15)
    assert forecast["step_s"] == pytest.approx(measured["step_s"], rel=0.25)
    assert forecast["staleness_mean"] == pytest.approx(measured["staleness_mean"], abs=0.5)
    assert (measured["idle_share"] > 0.3) == is_slow, "the learner waits in one case, the servers wait in the other"


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0
