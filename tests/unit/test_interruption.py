"""Ctrl-C ends every command that waits with one line that says what for, and exit code 130."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.config.loading import dump_config, validate
from penstock_tools.local import commands

ROOT = Path(__file__).parents[2]


@contextmanager
def interrupting_server() -> Iterator[int]:
    """A server that presses Ctrl-C when somebody connects, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                os.kill(os.getpid(), signal.SIGINT)
                connection.recv(2**20)
                while connection.recv(2**20):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["status"], "while it waited for the gateway at http://127.0.0.1:"),
        (["policies"], "while it waited for the gateway"),
        (["runs", "metrics"], "while it waited for the gateway"),
        (["servers"], "while it waited for the gateway"),
        (["watch"], "while it waited for results"),
        (["top"], "after it watched the run"),
        (["submit", str(ROOT / "examples/arithmetic/heldout.parquet"), "--limit", "3"], "nothing is submitted twice"),
    ],
)
def test_a_command_that_waits_for_a_gateway(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with interrupting_server() as port:
        assert cli.main([*words, "--url", f"http://127.0.0.1:{port}"]) == 130
    error = capsys.readouterr().err
    assert error.startswith(f"penstock {words[0]}: interrupted ") and what in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "what"), [(["queue", "stat"], "while it waited for Redis"), (["doctor"], "while it examined the run")]
)
def test_a_command_that_waits_for_redis(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupting_server() as port:
        data = {"model": {"path": "."}, "run_dir": str(tmp_path), "redis": {"url": f"redis://127.0.0.1:{port}"}}
        file = tmp_path / "run.yaml"
        file.write_text(dump_config(validate(data, "test")))
        assert cli.main([*words, "--config", str(file)]) == 130
    assert capsys.readouterr().err == f"penstock {words[0]}: interrupted {what}\n"


def test_an_interrupted_run_is_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> bool:
        return True

    monkeypatch.setattr("penstock_tools.local.supervisor.supervise", interrupted)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(validate({"model": {"path": str(ROOT / "examples/arithmetic/model")}}, "test")))
    assert commands.up([str(file)]) == 130
