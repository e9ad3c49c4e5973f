"""`penstock generate --servers` with stand-ins for its servers: deaths, signals, progress and GPUs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_tools.offline import servers
from penstock_tools.offline.answer_store import AnswerStore
from penstock_tools.offline.shard import WHOLE, Shard

FAILS = "import sys; print('penstock: error: no memory', file=sys.stderr); sys.exit(int(sys.argv[1]))"
ENDS = ""
WAITS = """
import signal, sys, threading
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
open(sys.argv[1], "w").close()
sys.exit(0 if ended.wait(60) else 9)
"""

Start = Callable[..., None]


@pytest.fixture
def answer_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Runs a program for each server, with the words that follow it."""

    def run(*programs: Sequence[str]) -> None:
        commands = [[sys.executable, "-c", *program] for program in programs]
        monkeypatch.setattr(servers, "server_command", lambda _, shard: commands[shard.index])
        servers.answer_in_servers([], [{}] * len(programs), WHOLE, tmp_path / "parts", 10)

    return run


def test_a_server_that_dies_is_reported_once_and_the_others_go_on(
    answer_in: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = f"open({str(tmp_path / 'ended')!r}, 'w')"
    answer_in([FAILS, "1"], [marker], ["import os; os.kill(os.getpid(), 9)"])
    assert (tmp_path / "ended").exists()
    lines = capfd.readouterr().err.splitlines()
    logs = tmp_path / "parts" / "logs"
    assert lines.pop(0) == f"starting 3 engines; their logs: {logs}"
    assert sorted(lines) == [
        f"server-0 exited with code 1: no memory (log: {logs / 'server-0.log'})",
        f"server-2 was killed by SIGKILL (log: {logs / 'server-2.log'})",
    ]


def test_wrong_input_ends_all_servers(answer_in: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="server-1 exited with code 2: no memory"):
        answer_in([WAITS, str(tmp_path / "waits")], [FAILS, "2"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_servers(number: signal.Signals, answer_in: Start, tmp_path: Path) -> None:
    """They end by themselves: none is killed. Handlers of signals are as before."""
    files = [tmp_path / "0", tmp_path / "1"]
    before = signal.getsignal(number)

    def interrupt() -> None:
        while not all(file.exists() for file in files):
            assert not done.wait(0.01)
        os.kill(os.getpid(), number)

    done = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            answer_in(*([WAITS, str(file)] for file in files))
    finally:
        done.set()
        thread.join(60)
    assert signal.getsignal(number) is before


def test_rows_are_counted_once(tmp_path: Path) -> None:
    from test_answer_store import SETTINGS, answer

    counted: dict[Path, int] = {}
    with AnswerStore(tmp_path / "a.parquet", SETTINGS, Shard(0, 2)) as store:
        for expected in (2, 4):
            store.add(answer(expected))
            store.add(answer(expected + 10))
            store.write_part()
            assert servers.count_rows(store.folder, counted) == expected
    assert len(counted) == 2 and servers.count_rows(tmp_path / "gone", counted) == 4


def test_each_server_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    environments = [environment["CUDA_VISIBLE_DEVICES"] for environment in servers.divide_machine(2, 2)]
    assert environments == ["2,3", "5,7"]
    with pytest.raises(ConfigError, match="--servers 3 needs 6 GPUs, but this machine has 4; lower --servers"):
        servers.divide_machine(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert servers.divide_machine(3, 2) == [{}] * 3, "CPUs are shared"


def test_the_command_of_a_server_overrides_the_options_that_divide() -> None:
    words = servers.server_command(["a.parquet", "--servers", "2", "--shard=1/2"], Shard(3, 4))
    assert words[1:] == [
        "-m", "penstock.cli.main", "generate", "a.parquet", "--servers", "2", "--shard=1/2", "--servers=1",
        "--shard=3/4", "--verbose",
    ]  # fmt: skip
