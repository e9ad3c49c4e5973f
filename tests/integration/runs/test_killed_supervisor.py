"""A supervisor that is killed with SIGKILL leaves no process behind, and a new one continues in the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from support.processes import DemoProcess, command_of, is_alive, until

SUPERVISOR = """
import sys, time
from pathlib import Path
from penstock_tools.local.processes import ProcessGroup

folder, grace_s, is_stubborn = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "stubborn"
group = ProcessGroup(folder, (folder / "lock").open("w"), orphan_grace_s=grace_s)
say = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print('ready', flush=True); time.sleep(600)"
note = "lambda *_: (open('{}/order', 'a').write('{}\\\\n'), sys.exit())"
nested = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}])\\n"
store = say.format(note.format(folder, "store"))
worker = say.format(note.format(folder, "worker"))
if is_stubborn:
    worker = nested.format("import time; time.sleep(600)") + worker
group.start("store", [sys.executable, "-c", store], ends_last=True)
group.start("worker", [sys.executable, "-c", worker])
if is_stubborn:
    group.start("deaf", [sys.executable, "-c", say.format("signal.SIG_IGN")])
time.sleep(600)
"""


def is_ready(folder: Path, *names: str) -> bool:
    logs = [folder / f"{name}.log" for name in names]
    return all(log.exists() and "ready" in log.read_text() for log in logs)


def test_children_of_a_killed_supervisor_are_told_to_end_and_the_store_ends_last(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path), "120", ""])
    try:
        until(lambda: is_ready(tmp_path, "store", "worker"), "the children")
        left = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(left) == 3, "two children, and the process that cleans up"
    finally:
        supervisor.kill()
        supervisor.wait(60)
    until(lambda: not [process for process in left if is_alive(process)], "the end of all processes")
    ended = (tmp_path / "order").read_text().split()
    # A child may be told twice in a row, by the kernel and by the process that cleans up.
    assert [name for name, _ in groupby(ended)] == ["worker", "store"]


def test_no_child_outlives_a_killed_supervisor_even_if_it_does_not_listen(tmp_path: Path) -> None:
    """A second after they were told to end, all that are left are killed. The store still comes last."""
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path), "1", "stubborn"])
    try:
        until(lambda: is_ready(tmp_path, "store", "worker", "deaf"), "the children")
        left = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(left) == 5, "three children, a grandchild, and the process that cleans up"
        [store] = [process for process in left if "write('store" in " ".join(command_of(process))]
        [cleanup] = [process for process in left if "orphan_cleanup" in " ".join(command_of(process))]
        others = [process for process in left if process not in (store, cleanup)]
    finally:
        supervisor.kill()
        supervisor.wait(60)

    def have_all_ended() -> bool:
        has_store_ended = not is_alive(store)
        alive = [command_of(process) for process in others if is_alive(process)]
        assert not (has_store_ended and alive), f"the store has ended before {alive}"
        return has_store_ended and not is_alive(cleanup)

    until(have_all_ended, "the end of all processes")


@pytest.mark.fault_row(
    "whole run", "`penstock up` is killed", how="SIGKILL to the supervisor of a local run",
    must="no process outlives it, and a new start continues the run",
)  # fmt: skip
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_ends_and_is_continued_in_the_same_folder(tmp_path: Path) -> None:
    words = (
        "--rollout.engine.name", "torch", "--learner.policy.num_ranks", "2", "--replay.groups_per_step", "8",
        "--learner.algorithm.kl.placement", "none", "--learner.num_steps", "100000",
        "--learner.checkpoint.every_steps", "2",
    )  # fmt: skip
    killed = DemoProcess(tmp_path, *words)
    try:
        killed.wait_for_step(3)
        left = killed.descendants()
        assert len(left) > 10
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(30)
        num_steps = len((killed.folder / "metrics.jsonl").read_text().splitlines())
        again = DemoProcess(tmp_path, *words)  # it waits for the processes of the killed one
        try:
            again.wait_for_step(num_steps + 2)
            assert not [process for process in left if is_alive(process)]
            again.process.send_signal(signal.SIGINT)
            assert again.wait() == 130, again.text()
        finally:
            again.end()
    finally:
        killed.end()
