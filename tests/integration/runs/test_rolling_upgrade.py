"""A rolling upgrade: each process gets SIGTERM and ends by itself, and its replacement continues its work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.machine import free_port
from support.fleet_runs import FleetRun, Part, fleet_config
from support.processes import SeenStates, probe
from support.redis_server import RedisProcess

pytestmark = pytest.mark.timeout(900)
TORCH = "--rollout.engine.name=torch"
GROUPS_PER_STEP = 8
SLOW_REWARD = """import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return 1.0
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, redis_process: RedisProcess) -> Iterator[FleetRun]:
    """One run that all tests of this file share. Its leases are so long that no prompt comes back by expiry."""
    folder = tmp_path_factory.mktemp("runs")
    config = fleet_config(folder, redis_process.url, "rolling", transport="gloo")
    replay = config.replay.model_copy(update={"lease_ttl_s": 300.0, "max_staleness": 8})
    with FleetRun(config.model_copy(update={"replay": replay}), redis_process.url) as run:
        yield run


@pytest.fixture
def new_server(run: FleetRun) -> Part:
    """A server that the first test in need of it starts, so that each test can also run alone."""
    return run.parts.get("new") or run.start_server("new", TORCH)


def stop_and_wait(run: FleetRun, part: Part, probed_port: int = 0) -> SeenStates:
    """Stop a process in order. Returns the states that it was seen in meanwhile, if there is a port to ask."""
    part.may_end = True
    part.process.terminate()
    part.go_on()
    states = SeenStates()

    def has_ended() -> bool:
        if probed_port:
            states.probe(probed_port)
        return part.process.poll() is not None

    run.until(has_ended, f"{part.name} to end")
    assert part.process.returncode == 0, part.output()[-3000:]
    return states


def freeze_at_work(run: FleetRun, part: Part) -> int:
    """Stop the process while it holds leases, and return how many."""

    def leased() -> int:
        part.stop()
        num_leased = run.stat().in_flight
        if not num_leased:
            part.go_on()
        return num_leased

    return run.until(leased, f"{part.name} to hold a lease")


def test_a_server_that_gets_sigterm_gives_its_prompts_back(run: FleetRun) -> None:
    # Without a learner only these prompts are admitted. Two run at a time, so the server is busy when it is stopped.
    num_admitted = (run.config.replay.max_staleness + 1) * GROUPS_PER_STEP
    port, states = free_port(), SeenStates()
    # Its rewards take a while, so that it has not made all groups before it is looked at.
    slow = run.config.folder / "slow_reward.py"
    slow.write_text(SLOW_REWARD)
    words = ("--rollout.max_concurrent_groups=2", f"--rollout.reward.function_file={slow}")
    old = run.start_server("old", TORCH, *words, f"--rollout.metrics_port={port}")
    assert run.until(lambda: probe(port, "/startupz"), "its endpoint")[0] == 503, "it answers before it has a model"
    assert probe(port, "/healthz") == (200, {"status": "alive"})
    run.until(lambda: states.probe(port) == "ready", "the server to be ready")
    assert states[0] == "loading" and probe(port, "/startupz") == (200, {"status": "started"})
    run.until(lambda: run.stat().queued >= 2, "two groups")
    assert 0 < freeze_at_work(run, old) <= 2
    assert set(stop_and_wait(run, old, port)) <= {"ready", "draining"}
    assert "old" not in run.servers()

    run.start_server("new", TORCH)
    run.until(lambda: run.stat().queued == num_admitted, "the groups of both")
    stat = run.stat()
    assert (stat.reclaimed, stat.dead_lettered, stat.in_flight, stat.conservation_error) == (0, 0, 0, 0)
    run.until(lambda: len(run.watch.groups) == num_admitted, "the watch, which looks now and then, to have seen them")
    assert {group.server_id for group in run.watch.all_groups()} == {"old", "new"}
    repeated = [group for group in run.watch.all_groups() if group.attempt > 1]
    # The server may have asked for one more when it was frozen.
    assert len(repeated) <= 2 and {group.server_id for group in repeated} <= {"new"}


@pytest.mark.long  # README's commands stop and resume a run too
def test_a_learner_that_gets_sigterm_writes_a_checkpoint_and_the_next_continues(
    run: FleetRun, new_server: Part
) -> None:
    every = "--learner.checkpoint.every_steps=100000"
    port, states = free_port(), SeenStates()
    first = run.start_learner(every, f"--learner.metrics_port={port}")
    run.until(lambda: states.probe(port) == "ready", "the learner to train")
    assert states == ["loading", "ready"]
    run.until_serving("new", above=2)
    assert stop_and_wait(run, first, port)[-1] == "draining"
    trained_step = steps(run)[-1]
    assert newest_checkpoint(run.config.folder)["step"] == trained_step >= 2
    stat = run.stat()
    assert stat.trained == trained_step * GROUPS_PER_STEP, "all of it is acknowledged"
    version = run.current

    second = run.start_learner(every, name="second")
    run.until_serving("new", above=version + 2)
    stop_and_wait(run, second)
    assert "continuing from" in second.output()
    assert steps(run) == list(range(1, steps(run)[-1] + 1)), "no step twice, none left out"
    assert run.stat().conservation_error == 0


@pytest.mark.long
def test_servers_are_replaced_one_by_one_while_the_learner_trains(run: FleetRun, new_server: Part) -> None:
    """A leaving server holds up no version, not even if it leaves during a push."""
    run.start_learner(name="third")
    run.start_server("second", TORCH)
    run.until_serving("new", "second", above=run.current)
    since_s = run.redis_time_s()
    run.until(lambda: "LOADING" in run.watch.states("new", since_s), "a push to new")
    stop_and_wait(run, new_server)
    left_at = time.time()
    run.start_server("newer", TORCH)
    run.until_serving("second", "newer", above=run.current + 2)
    assert "EVICTED" not in run.watch.states("second", since_s)
    assert "new" not in run.servers()
    assert run.watch.groups_of("second", left_at * 1000), "the other goes on meanwhile"
    assert run.stat().reclaimed == 0 and run.stat().dead_lettered == 0


def steps(run: FleetRun) -> list[int]:
    lines = (run.config.folder / "metrics.jsonl").read_text().splitlines()
    return [int(json.loads(line)["step"]) for line in lines]


def newest_checkpoint(folder: Path) -> dict[str, int]:
    newest = sorted((folder / "checkpoints").glob("term-*-step-????????"))[-1]
    trainer: dict[str, int] = json.loads((newest / "trainer.json").read_text())
    return trainer
