"""The watch over SGLang's processes, with another program in their place."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock_rollout.engines.sglang import server as sglang_server
from penstock_rollout.engines.sglang.server import SglangServer
from support.processes import until


@pytest.mark.parametrize(
    ("number", "is_child", "reason"),
    [
        (signal.SIGSTOP, False, "its process {} is stopped (SIGSTOP)"),
        (signal.SIGSTOP, True, "its process {} is stopped (SIGSTOP)"),
        (signal.SIGKILL, False, "SGLang ended with code -9"),
    ],
)
async def test_a_process_that_is_stopped_or_dies_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, is_child: bool, reason: str
) -> None:
    """The HTTP process still answers while a scheduler, which is a child of it, is stopped."""
    monkeypatch.setattr(sglang_server, "LOAD_POLL_S", 0.02)
    written = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {written}; wait"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, start_new_session=True)
    await asyncio.to_thread(until, lambda: written.exists() and written.read_text().endswith("\n"), "its child")
    scheduler, lost = int(written.read_text()), list[str]()
    server = SglangServer("module", [], 1, lost.append, {})
    calls = server.calls

    async def load() -> tuple[int, float]:
        return 0, 0.0

    monkeypatch.setattr(server, "calls", SimpleNamespace(load=load))
    server._process = process
    try:
        watching = asyncio.create_task(server._watch(process))
        await asyncio.sleep(0.1)
        assert not watching.done() and server.is_alive
        signalled = scheduler if is_child else process.pid
        os.kill(signalled, number)
        async with asyncio.timeout(60):
            await watching
        assert lost == [reason.format(signalled)] and not server.is_alive
    finally:
        monkeypatch.setattr(server, "calls", calls)
        async with asyncio.timeout(60):
            await server.stop()
