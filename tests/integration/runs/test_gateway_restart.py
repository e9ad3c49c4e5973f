"""`penstock up` starts a gateway that died again, where its clients look for it, and the workers beside the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.client.address import read_restarting
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock_tools.local.local_run import GATEWAY, LocalRun
from penstock_tools.local.processes import Child

POLL_S, ANSWER_S, START_S = 0.1, 5.0, 180.0
MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"


def test_a_killed_gateway_comes_back_at_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(check_killed_gateway(tmp_path, lambda: capsys.readouterr().err))


async def answers(run: LocalRun) -> bool:
    await run.check()
    try:
        async with asyncio.timeout(ANSWER_S):  # the client would go on trying, and nobody would check the processes
            return (await run.client.get_run()).run == "test"
    except (TimeoutError, Unavailable):
        return False


async def check_killed_gateway(folder: Path, said_by_command: Callable[[], str]) -> None:
    config = validate({"run": "test", "run_dir": str(folder), "model": {"path": str(MODEL)}}, "test")
    said: list[str] = []
    async with Recorded(config) as run:
        run.on_restart = said.append
        (gateway,) = (child for child in run.processes.children if child.name == GATEWAY)
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait(60)
        await run.check()
        assert await asyncio.to_thread(cli.main, ["status", "--run-dir", str(run.folder)]) == 2
        assert f"starting gateway of the run in {run.folder} again (gateway was killed by SIGKILL" in said_by_command()

        async with asyncio.timeout(START_S):
            while not await answers(run):
                await asyncio.sleep(POLL_S)
        assert len(said) == 1 and said[0].startswith("gateway was killed by SIGKILL")
        assert "it is started again in 1 s (restart 1 of 5)" in said[0]
        (notice,) = (await run.client.get_run()).notices
        assert notice.kind == "process_restarted" and notice.text.startswith("gateway was killed")
        async with asyncio.timeout(START_S):  # the gateway may answer before it writes its address
            while read_restarting(run.folder):
                await run.check()
                await asyncio.sleep(POLL_S)
        assert await asyncio.to_thread(cli.main, ["status", "--run-dir", str(run.folder)]) == 0


class Recorded(LocalRun):
    """A run whose workers are idle processes. It records who was started before the gateway was up, which is stopped
    until the last worker was."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.early: list[str] = []

    def _start_process(self, name: str, module: str, *arguments: str, stop_timeout_s: float = 20) -> Child:
        if not (self.folder / "gateway.json").exists():
            self.early.append(name)
        if name == GATEWAY:
            gateway = super()._start_process(name, module, *arguments, stop_timeout_s=stop_timeout_s)
            gateway.process.send_signal(signal.SIGSTOP)
            return gateway
        code = "os.kill(os.getpid(), 9)" if name == "rollout-1" else "time.sleep(600)"
        worker = self.processes.start(name, [sys.executable, "-c", f"import os, time; {code}"])
        if name == self._server_ids[-1]:
            self.processes.children[1].process.send_signal(signal.SIGCONT)
        return worker


def test_workers_start_alongside_the_gateway_and_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    asyncio.run(check_workers(tmp_path))


async def check_workers(folder: Path) -> None:
    settings = {"run": "test", "run_dir": str(folder), "model": {"path": str(MODEL)}, "rollout": {"num_servers": 2}}
    said: list[str] = []
    async with Recorded(validate(settings, "test")) as run:
        run.on_restart = said.append
        assert run.early == [GATEWAY, "learner", "rollout-0", "rollout-1"]
        run.start_feed()
        names = [child.name for child in run.processes.children]
        assert names == ["redis", GATEWAY, "learner", "rollout-0", "rollout-1"], "each once; the first ends last"
        async with asyncio.timeout(START_S):
            while not said:
                await run.check()
                await asyncio.sleep(POLL_S)
        assert said[0].startswith("rollout-1 was killed by SIGKILL"), said
