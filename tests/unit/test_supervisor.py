"""Tests what `penstock up` says when a process whose death ends the run has died."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from penstock.api.records import QueueStat, Run
from penstock.cli import main as cli
from penstock.config.loading import load_config
from penstock.errors import ProcessDied
from penstock_tools.local import commands, supervisor
from penstock_tools.local.supervisor import check_processes, kept_line, supervise

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"


class DeadLearner:
    async def check(self) -> None:
        raise ProcessDied("learner was killed by signal 9 (log: runs/demo/logs/learner.log)")


class Display:
    def __init__(self) -> None:
        self.printed: list[str] = []

    def print(self, line: str) -> None:
        self.printed.append(line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "^penstock: error: nothing to view: .* has no Redis of a run, .*`penstock plot`$"),
        (("--check",), "--view starts nothing that could be checked or joined"),
        (("--host", "10.0.0.1"), "--view starts nothing that could be checked or joined"),
        (("--redis.url", "redis://127.0.0.1:1", "--gateway.host", "0.0.0.0"), "is not loopback and needs a key"),
    ],
)
def test_a_view_that_cannot_be_shown_is_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", str(DEMO), "--view", "--run_dir", str(tmp_path / "runs"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line) and not (tmp_path / "runs").exists()


async def test_the_process_whose_death_ends_the_run_is_named_at_once() -> None:
    display = Display()
    with pytest.raises(ProcessDied, match=r"signal 9 .* fix the cause and start the run again"):
        await check_processes(cast(Any, DeadLearner()), cast(Any, display))
    assert display.printed == ["learner has died; stopping the others, which may take a minute"]


class StoppedRun:
    """A run that gets Ctrl-C when its feed is started, and again while it stops."""

    has_trained, is_up = True, True
    learner_finished, console = False, ""

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.folder = config, config.folder
        self.killed = asyncio.Event()
        self.processes = SimpleNamespace(on_wait=None, end_at_once=self.killed.set)
        queue = QueueStat(**dict.fromkeys(QueueStat.model_fields, 0))
        status = Run(
            run="test", step=9, policy_version=9, term=1, queue=queue, metrics={}, servers=(), state="RUNNING",
            held_version=None, detail="",
        )  # fmt: skip
        self.client = SimpleNamespace(get_run=self._answer(status))

    @staticmethod
    def _answer(status: Run) -> Any:
        async def get_run() -> Run:
            return status

        return get_run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self.killed.is_set(), "the first Ctrl-C waits"
        assert not self.has_trained, "the learner has not begun to train"
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            await self.killed.wait()

    async def check(self) -> None: ...

    def end_hung(self, _: object) -> None: ...

    def start_feed(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


async def test_a_second_ctrl_c_kills_and_what_is_kept_and_lost_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LocalRun", StoppedRun)
    config = load_config(DEMO, ["--run_dir", str(tmp_path)])
    (config.folder / "checkpoints" / "term-000001-step-00000005").mkdir(parents=True)
    (config.folder / "checkpoints" / "term-000001-step-00000009.partial").mkdir()
    assert await supervise(config), "Ctrl-C ended it"
    *_, stopping, killing, kept = capsys.readouterr().out.splitlines()
    assert stopping.startswith("stopping the run; ") and "Ctrl-C again kills every process at once" in stopping
    assert killing == "killing every process"
    assert kept == (
        "kept: checkpoint of step 5; lost: 4 steps since then, to be made again; continue with the same command"
    )
    assert kept_line(config, 5) == "kept: checkpoint of step 5; continue with the same command"


class FinishedRun(StoppedRun):
    learner_finished, config_file = True, Path("runs/test/config.yaml")

    async def __aexit__(self, *_: object) -> None: ...

    def start_feed(self) -> None: ...


async def test_the_end_says_what_was_kept_and_what_to_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LocalRun", FinishedRun)
    config = load_config(DEMO, ["--run_dir", str(tmp_path)])
    (config.folder / "checkpoints" / "term-000001-step-00000009").mkdir(parents=True)
    assert not await supervise(config), "it was not interrupted"
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("kept: checkpoint of step 9; `penstock export --config runs/test/config.yaml --out DIR`")


class StartingRun(StoppedRun):
    """A run whose gateway does not come up, and that gets Ctrl-C twice meanwhile."""

    is_up = False

    async def __aenter__(self) -> Self:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return self


async def test_a_second_ctrl_c_ends_a_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LocalRun", StartingRun)
    task = asyncio.create_task(supervise(load_config(DEMO, ["--run_dir", str(tmp_path)])))
    async with asyncio.timeout(60):
        await asyncio.wait({task})
    assert task.cancelled()
    assert capsys.readouterr().out.splitlines()[-1] == "killing every process"


def test_a_cancelled_start_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: object) -> bool:
        raise asyncio.CancelledError

    monkeypatch.setattr(supervisor, "supervise", cancelled)
    with pytest.raises(KeyboardInterrupt, match="before the run was up; every process of it was stopped"):
        commands.up([str(DEMO), "--run_dir", str(tmp_path)])
