"""A process that waits to become EngineCore, without vLLM in it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config.rollout import EngineConfig
from penstock_rollout.engines.vllm import standby as module
from penstock_rollout.engines.vllm.standby import SWITCH, Standby, StandbyContext
from support.processes import is_alive, until

SERVER = """
import time
from penstock_rollout.engines.vllm.standby import Standby

if __name__ == "__main__":
    waiting = Standby(str)
    assert waiting.is_ready()
    print(waiting.process.pid, flush=True)
    time.sleep(600)
"""


class ReadsEnvironment:
    """Remembers the environment of the process in which it is read."""

    def __init__(self) -> None:
        self.read = ""

    def __setstate__(self, state: dict[str, str]) -> None:
        self.read = f"{os.environ.get('PENSTOCK_TEST_LATE')} {os.environ.get('PENSTOCK_TEST_EARLY')}"


def write(path: Path, given: ReadsEnvironment, *_: Any) -> None:
    path.write_text(f"{os.getpid()} {given.read}")
    sys.exit(7)


@pytest.fixture
def standby(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    monkeypatch.setenv("PENSTOCK_TEST_EARLY", "yes")
    started = Standby(str)
    yield started
    started.close()


def test_it_becomes_the_process_and_has_the_environment_before_it_reads_arguments(
    standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_LATE", "yes")
    monkeypatch.delenv("PENSTOCK_TEST_EARLY")
    assert standby.is_ready(60)
    pid = standby.process.pid
    process = StandbyContext(standby).Process(target=write, args=(tmp_path / "said", ReadsEnvironment()))
    process.start()
    process.join(60)
    assert process.exitcode == 7 and process.pid == pid
    assert (tmp_path / "said").read_text() == f"{pid} yes None"


def test_only_the_first_process_is_the_standby(standby: Standby, tmp_path: Path) -> None:
    context, pid = StandbyContext(standby), standby.process.pid
    processes = [context.Process(target=write, args=(tmp_path / name, ReadsEnvironment())) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [7, 7]
    assert [(tmp_path / name).read_text().split()[0] == str(pid) for name in "ab"] == [True, False]


def test_a_process_that_is_given_open_files_is_a_new_one(
    standby: Standby, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context, pid = StandbyContext(standby), standby.process.pid
    queue = context.Queue()  # kept until the process has ended
    process = context.Process(target=write, args=(tmp_path / "said", ReadsEnvironment(), queue))
    with caplog.at_level(logging.WARNING):
        process.start()
    process.join(60)
    assert process.exitcode == 7 and process.pid != pid
    assert "it is given open files" in caplog.text


def test_what_cannot_be_imported_is_logged_and_leaves_no_process(caplog: pytest.LogCaptureFixture) -> None:
    standby = Standby(partial(str, "no libcuda"))
    process = psutil.Process(standby.process.pid)
    assert not standby.is_ready(60)
    assert "takes longer: no libcuda" in caplog.text
    assert not is_alive(process)


@pytest.mark.parametrize("preload", [partial(sys.exit, 3), partial(time.sleep, 600)])
def test_a_process_that_dies_or_hangs_is_not_waited_for(preload: Any) -> None:
    standby = Standby(preload)
    process = psutil.Process(standby.process.pid)
    assert not standby.is_ready(600 if preload.func is sys.exit else 0.1)
    assert not is_alive(process)


def test_it_ends_with_a_killed_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        process = psutil.Process(int(server.stdout.readline()))
        assert is_alive(process)
    finally:
        server.send_signal(signal.SIGKILL)
        server.communicate(timeout=120)
    until(lambda: not is_alive(process), "the end of the standby process")


@pytest.mark.parametrize(
    ("is_cpu", "variables", "extra", "is_used"),
    [
        (True, {}, {}, False),
        (False, {}, {}, True),
        (False, {SWITCH: "0"}, {}, False),
        (True, {SWITCH: "1"}, {}, True),
        (False, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, {}, False),
        (False, {}, {"numa_bind": True}, False),
    ],
)
def test_where_it_is_used(
    is_cpu: bool,
    variables: dict[str, str],
    extra: dict[str, Any],
    is_used: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    started: list[partial[str]] = []
    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(module, "is_cpu_build", lambda: is_cpu)
    monkeypatch.setattr(module, "Standby", started.append)
    module.start_standby(EngineConfig(name="vllm", extra=extra), tmp_path)
    assert [preload.args for preload in started] == [(["Qwen2ForCausalLM"],)] * is_used
