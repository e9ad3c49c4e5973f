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

from support.processes import DemoProcess, is_alive, until

SUPERVISOR = """
import sys, time
from pathlib import Path
from penstock_tools.local.processes import ProcessGroup

folder = Path(sys.argv[1])
group = ProcessGroup(folder, (folder / "lock").open("w"), orphan_grace_s=1)
say = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print('ready', flush=True); time.sleep(600)"
note = "lambda *_: (open('{}/order', 'a').write('{}\\\\n'), sys.exit())"
nested = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}])\\n"
store = say.format(note.format(folder, "store"))
worker = nested.format("import time; time.sleep(600)") + say.format(note.format(folder, "worker"))
group.start("store", [sys.executable, "-c", store], ends_last=True)
group.start("worker", [sys.executable, "-c", worker])
group.start("deaf", [sys.executable, "-c", say.format("signal.SIG_IGN")])
time.sleep(600)
"""


def is_ready(folder: Path) -> bool:
    logs = [folder / f"{name}.log" for name in ("store", "worker", "deaf")]
    return all(log.exists() and "ready" in log.read_text() for log in logs)


def test_no_child_outlives_a_killed_supervisor_and_the_store_ends_last(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)])
    try:
        until(lambda: is_ready(tmp_path), "the children")
        left = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(left) == 5, "three children, a grandchild, and the process that cleans up"
    finally:
        supervisor.kill()
        supervisor.wait(30)
    until(lambda: not [process for process in left if is_alive(process)], "the end of all processes")
    ended = (tmp_path / "order").read_text().split()
    # A child may be told twice in a row, by the kernel and by the process that cleans up.
    assert [name for name, _ in groupby(ended)] == ["worker", "store"]


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
