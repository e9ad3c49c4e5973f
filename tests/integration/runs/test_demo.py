"""The whole demo as a newcomer starts it: real Redis, gateway, vLLM, Ray, and two FSDP2 ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.samples import SampleFilter, groups_newest_first, select
from support.bench_smoke import FOLLOWERS, SmokeRun
from support.processes import DemoProcess, command_of, until


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DemoProcess]:
    started = DemoProcess(tmp_path, *request.param)
    yield started
    started.end()


@pytest.fixture
def followers(tmp_path: Path) -> Iterator[list[SmokeRun]]:
    """Programs that wait for the demo. On a busy machine their imports take longer than the demo, so a test asks for
    them before it."""
    started = [SmokeRun(program, tmp_path, tmp_path / "t") for program in FOLLOWERS]
    yield started
    for benchmark in started:
        benchmark.end()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("demo", [("--learner.num_steps", "8", "--learner.checkpoint.every_steps", "5")], indirect=True)
def test_a_short_demo_trains_and_stops_cleanly(followers: list[SmokeRun], demo: DemoProcess) -> None:
    """The benchmarks of whole runs follow this one, so that they need not start others."""
    demo.wait_for_step(1)  # early, so that it does not end meanwhile
    exposed = scrape(demo.folder, "rollout-0")
    assert {"penstock_groups_produced", "vllm:num_requests_running"} <= exposed
    assert {"penstock_learner_steps", "penstock_weight_syncs"} <= scrape(demo.folder, "learner")

    assert demo.wait() == 0, demo.text()
    summary = json.loads((demo.folder / "summary.json").read_text())
    assert summary["steps"] == summary["policy_version"] == 8
    assert summary["groups_trained"] == 8 * 32
    assert summary["conservation_error"] == 0
    assert summary["engine"] == "vllm"
    assert 0.3 < summary["score_start"] < 0.5 < summary["score_end"] + 0.1
    assert 0 < summary["staleness_mean"] <= summary["staleness_max"] <= 2
    assert summary["tokens_per_second"] > 0
    assert summary["seconds"] > 0
    assert (demo.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out score" in demo.text()
    assert demo.orphans() == []
    assert [path.name for path in demo.folder.iterdir() if path.stat().st_mode & 0o077] == [], "its files are private"
    assert groups_by_step(demo.folder) == dict.fromkeys(range(1, 9), 32)
    sample = select(demo.folder, SampleFilter(), 1, "best")[0]
    assert sample.reward == 1.0 and str(sample.ground_truth) in sample.response, sample
    assert sample.prompt and sample.server_id == "rollout-0" and sample.step - 3 <= sample.min_version < sample.step
    mismatches = [json.loads(line).get("logprob_mismatch") for line in metrics_lines(demo.folder)]
    assert all(value < 1e-3 for value in mismatches if value is not None)
    assert mismatches[0] is not None, "the first batch is on policy, so engine and learner can be compared"
    for benchmark in followers:
        benchmark.finish()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "demo",
    [("--rollout.engine.name", "torch", "--learner.num_steps", "100000", "--max_restarts", "1")],
    indirect=True,
)
def test_a_killed_server_is_started_again_and_ends_the_demo_when_its_restarts_are_used_up(demo: DemoProcess) -> None:
    demo.wait_for_step(2)
    kill_server(demo)
    until(lambda: len(servers(demo)) == 1, "a new server")
    demo.wait_for_step(len(metrics_lines(demo.folder)) + 8)  # more than the queue holds without a server
    assert "rollout-0 was killed by SIGKILL" in demo.text()
    assert "it is started again in 1 s (restart 1 of 1)" in demo.text()
    status = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "status", "--run-dir", str(demo.folder)],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "300"},
    )  # fmt: skip
    assert "`penstock up` starts it again" in status.stdout
    until(lambda: not zombies(demo), "an end without zombies")

    kill_server(demo)
    assert demo.wait() == 1
    last = demo.text().strip().splitlines()[-1]
    assert last.startswith("penstock: error: rollout-0 was killed by SIGKILL")
    assert last.endswith("; max_restarts is 1")
    assert demo.orphans() == []


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_run_whose_learner_was_killed_goes_on_when_started_again(tmp_path: Path) -> None:
    """No acknowledged group is lost: the second start continues with the queue and the checkpoint of the first."""
    overrides = ("--rollout.engine.name", "torch", "--learner.num_steps", "8", "--learner.checkpoint.every_steps", "3")
    first = DemoProcess(tmp_path, *overrides)
    try:
        first.wait_for_step(5)
        [learner] = [p for p in first.descendants() if "penstock_learner" in command_of(p)]
        os.kill(learner.pid, signal.SIGKILL)
        assert first.wait() == 1
        assert "learner was killed by SIGKILL" in first.text()
        assert first.orphans() == []
    finally:
        first.end()
    second = DemoProcess(tmp_path, *overrides)
    try:
        assert second.wait() == 0, second.text()
        assert "continuing from" in (second.folder / "logs" / "learner.log").read_text()
        summary = json.loads((second.folder / "summary.json").read_text())
        assert (summary["steps"], summary["groups_trained"], summary["conservation_error"]) == (8, 8 * 32, 0)
        assert groups_by_step(second.folder) == dict.fromkeys(range(1, 9), 32), "no step is there twice"
        assert summary["policy_version"] > 8, "a version is never used twice, not even after a crash"
    finally:
        second.end()


def servers(demo: DemoProcess) -> list[psutil.Process]:
    return [process for process in demo.descendants() if "penstock_rollout" in command_of(process)]


def zombies(demo: DemoProcess) -> list[psutil.Process]:
    found = []
    for process in demo.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_server(demo: DemoProcess) -> None:
    [server] = servers(demo)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server not in servers(demo), "the end of the server")


def groups_by_step(folder: Path) -> dict[int, int]:
    """How many groups of each step `samples.jsonl` has."""
    return dict(sorted(Counter(line["step"] for _, line in groups_newest_first(folder)).items()))


def metrics_lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def scrape(folder: Path, component: str) -> set[str]:
    """Names of the metric families that a process exposes."""
    import urllib.request

    endpoint = json.loads((folder / f"{component}.json").read_text())
    url = f"http://{endpoint['host']}:{endpoint['metrics_port']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        return {family.name for family in text_string_to_metric_families(response.read().decode())}
