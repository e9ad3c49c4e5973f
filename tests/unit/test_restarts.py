"""The processes of a local run that died are started again, and no zombie is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.api.records import Server
from penstock.config.loading import load_config
from penstock.errors import ConfigError, ProcessDied
from penstock_tools.local import local_run, processes
from penstock_tools.local.local_run import LocalRun, _work_at_end
from penstock_tools.local.processes import Child, HungServers, ProcessGroup, Restart, Restarts
from support.processes import until

SERVER = "rollout-0"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    group = ProcessGroup(tmp_path / "logs")
    yield group
    group.stop()


def kill(group: ProcessGroup) -> None:
    [child] = group.children
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait(60)


def is_ready(_: Child) -> bool:
    return True


def is_starting(_: Child) -> bool:
    return False


def test_a_killed_process_is_started_again_after_growing_waits_up_to_the_limit(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts, now = Restarts(group, (SERVER,), 2, is_starting), [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    group.start(SERVER, ["sleep", "1000"])
    assert restarts.check() == []
    for number, delay_s in ((1, 1.0), (2, 2.0)):
        kill(group)
        [found] = restarts.check()
        assert (found.name, found.number, found.delay_s) == (SERVER, number, delay_s)
        assert found.text.startswith("rollout-0 was killed by SIGKILL")
        now[0] += delay_s - 0.1
        assert restarts.check() == [] and group.children[0].exit_code is not None, "it is too early"
        now[0] += 0.2
        assert restarts.check() == [] and group.children[0].exit_code is None
    kill(group)
    with pytest.raises(ProcessDied, match="rollout-0 was killed by SIGKILL.*; max_restarts is 2"):
        restarts.check()


def test_a_process_that_ran_for_long_has_all_its_restarts_again(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BACK_OFF_S", 0.0)
    restarts = Restarts(group, (SERVER,), 1, is_starting)
    group.start(SERVER, ["sleep", "1000"])
    for _ in range(2):
        kill(group)
        group.children[0].started_at -= processes.HEALTHY_S + 1
        [found] = restarts.check()
        assert found.number == 1
        until(lambda: restarts.check() == [] and group.children[0].exit_code is None, "the new process")


def test_a_process_may_be_started_again_without_end(group: ProcessGroup) -> None:
    """As those of `penstock join` while the network is away: after a day there were more than 1024 restarts."""
    restarts = Restarts(group, (SERVER,), sys.maxsize, is_ready)
    restarts._num_restarts[SERVER] = 2000
    group.start(SERVER, ["sleep", "1000"])
    kill(group)
    [found] = restarts.check()
    assert (found.number, found.delay_s) == (2001, processes.BACK_OFF_CAP_S)


def served(age_s: float, name: str = SERVER) -> Server:
    return Server(
        server_id=name, address="127.0.0.1:1", state="READY", policy_version=0, heartbeat_age_ms=int(1000 * age_s),
        running_groups=0, engine="torch", weights_digest="", is_drained=False,
    )  # fmt: skip


def test_a_server_hangs_if_every_status_for_long_shows_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    hung = HungServers(recent_s=15, limit_s=100)

    def look(age_s: float | None, *may_hang: str, after_s: float = 5) -> dict[str, float]:
        now[0] += after_s
        return hung.update(None if age_s is None else [served(age_s)], may_hang or (SERVER,))

    def looks(*ages_s: float | None) -> list[float]:
        return [age_s for age in ages_s for age_s in look(age).values()]

    assert looks(500, *range(505, 601, 5)) == [], "Redis was away, and every heartbeat is old"
    assert looks(1, *range(20, 121, 5)) == [], "it was there meanwhile"
    assert look(125) == {SERVER: 125}
    assert look(130, "rollout-1") == {} and look(135) == {}, "it is starting again"
    assert looks(1, 20, *(None if number % 2 else 20 + 5 * number for number in range(1, 21))) == []
    assert look(125) == {SERVER: 125}, "a status that is missing now and then does not begin the count again"
    assert looks(1, 20, 30, *[None] * 50) == [] and look(530) == {}, "without a status nobody knows"


def test_a_stopped_server_hangs_as_soon_as_its_heartbeat_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now, hung = [0.0], HungServers(recent_s=15, limit_s=100)
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])

    def look(age_s: float, *stopped: str) -> tuple[dict[str, float], dict[str, float]]:
        now[0] += 1
        return hung.update([served(age_s)], (SERVER,), stopped), hung.newly_silent

    assert look(10, SERVER) == ({}, {}) and look(16, SERVER) == ({}, {}), "one status may come after Redis was away"
    assert look(17, SERVER)[0] == {SERVER: 17}
    assert look(1) == look(16) == ({}, {})
    assert look(17) == ({}, {SERVER: 17}), "it is said once that another is silent"
    assert look(18) == ({}, {})


def test_a_process_that_hangs_is_killed_and_started_again(group: ProcessGroup) -> None:
    restarts = Restarts(group, (SERVER,), 1, is_ready)
    child = group.start(SERVER, ["sh", "-c", "sleep 1000; true"])
    assert not child.is_stopped
    os.kill(child.process.pid, signal.SIGSTOP)
    until(lambda: child.is_stopped, "the process to stop")
    assert restarts.check() == []
    group.kill(child, "sent no heartbeat for 135 s and was killed")
    child.process.wait(60)
    [found] = restarts.check()
    assert found.text.startswith("rollout-0 sent no heartbeat for 135 s and was killed (log: ")


@pytest.mark.parametrize(("name", "was_ready", "code", "goes_on"), [
    (SERVER, is_starting, 1, False), (SERVER, is_ready, 1, True), (SERVER, is_ready, 2, False),
    ("learner", is_ready, 1, False),
])  # fmt: skip
def test_a_process_that_exits_is_started_again_only_if_it_was_ready(
    group: ProcessGroup, name: str, was_ready: Callable[[Child], bool], code: int, goes_on: bool
) -> None:
    restarts = Restarts(group, (SERVER,), 5, was_ready)
    group.start(name, ["sh", "-c", f"echo error: no room; exit {code}"]).process.wait(60)
    if goes_on:
        assert isinstance(restarts.check()[0], Restart)
        return
    with pytest.raises(ConfigError if code == 2 else ProcessDied, match=f"{name} exited with code {code}: no room"):
        restarts.check()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")
def test_adopted_processes_leave_no_zombies_and_the_rest_of_a_dead_process_is_killed(group: ProcessGroup) -> None:
    with subprocess.Popen(["true"]) as other:  # a child of this process that has ended and that somebody else waits for
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        check_adoption(group)
        assert other.wait(60) == 0


def check_adoption(group: ProcessGroup) -> None:
    child = group.start(SERVER, ["sh", "-c", "(sleep 0.1 &); (sleep 1001 &); sleep 1000"])
    until(lambda: len(adopted(group)) == 2, "the orphans")
    until(lambda: psutil.STATUS_ZOMBIE in [p.status() for p in adopted(group)], "the end of an orphan")
    assert group.ended() == []
    [left] = adopted(group)
    until(lambda: left.cmdline() == ["sleep", "1001"], "the program of the other orphan")
    kill(group)
    group.start_again(child)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert group.ended() == []
    assert left not in psutil.Process().children()


def test_processes_that_were_there_before_the_group_live_on(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1002"]) as other:
        try:
            group = ProcessGroup(tmp_path / "logs")
            child = group.start(SERVER, ["sh", "-c", "(sleep 1003 &); sleep 1000"])
            until(lambda: len(adopted(group)) == 1, "the orphan")
            [orphan] = adopted(group)
            group.stop()
            assert child.exit_code is not None and not orphan.is_running()
            assert other.poll() is None
        finally:
            other.kill()


SAVING = """
trap 'mkdir {0}.partial; until [ -e {0}-go ]; do sleep 0.02; done; mv {0}.partial {0}; exit 0' TERM
touch {0}-ready
while :; do sleep 0.02; done
"""


def start_saving(group: ProcessGroup, checkpoint: Path) -> Child:
    """Start a stand-in for a learner: at SIGTERM it writes a checkpoint, which ends once `CHECKPOINT-go` is there."""
    learner = group.start("learner", ["sh", "-c", SAVING.format(checkpoint)], stop_timeout_s=1000)
    learner.work_at_end = partial(_work_at_end, checkpoint.parent, 0.0)
    until(lambda: checkpoint.with_name(f"{checkpoint.name}-ready").exists(), "the learner")
    return learner


def test_the_end_of_a_run_waits_until_the_checkpoint_is_written(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "QUIET_S", 0.0)
    monkeypatch.setattr(processes, "STILL_AFTER_S", 0.0)
    checkpoint, lines = tmp_path / "term-000001-step-00000007", list[str]()

    def on_wait(line: str) -> None:
        lines.append(line)
        if "still writing" in line:
            (tmp_path / f"{checkpoint.name}-go").touch()

    group.on_wait = on_wait
    learner = start_saving(group, checkpoint)
    group.stop()
    assert learner.exit_code == 0 and checkpoint.exists()
    assert lines[0].startswith("waiting for learner to end, at most 1000 s (log: ")
    assert "learner: writing the checkpoint of step 7" in lines


def test_a_second_ctrl_c_kills_all_but_redis_at_once(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "QUIET_S", 0.0)
    redis = group.start("redis", ["sh", "-c", f"trap 'touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/up; "
                                  "while :; do sleep 0.02; done"], ends_last=True, stop_timeout_s=1000)  # fmt: skip
    until((tmp_path / "up").exists, "redis")
    learner = start_saving(group, tmp_path / "term-000001-step-00000007")
    group.on_wait = lambda _: group.end_at_once()
    group.stop()
    assert learner.exit_code == -signal.SIGKILL
    assert redis.exit_code == 0 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(("redis", "error", "has_trained", "expected_s"), [
    ("sleep 1000", None, True, 1800), ("sleep 1000", ProcessDied("rollout-0 was killed"), True, 1800),
    ("true", ProcessDied("redis was killed"), True, 60), ("sleep 1000", asyncio.CancelledError(), True, 60),
    ("sleep 1000", None, False, 60),
])  # fmt: skip
async def test_only_a_learner_that_can_save_has_long_for_it(
    redis: str,
    error: BaseException | None,
    has_trained: bool,
    expected_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without Redis it cannot acknowledge what it has trained, and the demo is not continued."""
    example = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"
    run = LocalRun(load_config(example, ["--run_dir", str(tmp_path)]))
    monkeypatch.setattr(local_run, "visible_gpus", list)
    monkeypatch.setattr(
        run, "_start_process", lambda name, *_, **options: run.processes.start(name, ["true"], **options)
    )
    child = run.processes.start("redis", redis.split(), ends_last=True)
    if redis == "true":
        child.process.wait(60)
    run._start_workers()
    run.has_trained = has_trained
    await run.__aexit__(None, error)
    assert run._learner is not None and run._learner.stop_timeout_s == expected_s


def adopted(group: ProcessGroup) -> list[psutil.Process]:
    """Processes in the sessions of children that are not their descendants any more."""
    leaders = {child.process.pid for child in group.children}
    found = [process for process in psutil.Process().children() if process.pid not in leaders]
    return [process for process in found if session_of(process) in leaders]


def session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):  # it was reaped meanwhile
        return os.getsid(process.pid)
    return None
