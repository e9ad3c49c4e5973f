"""Reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

RECANCEL_S = 0.5


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended. Its result or exception is ignored.

    The cancellation is repeated: before Python 3.12 `asyncio.wait_for`, which client libraries use, can swallow one."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=RECANCEL_S)
    with contextlib.suppress(asyncio.CancelledError, Exception):
        task.result()


async def to_the_end(last_call: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Await a last call even if this task is cancelled meanwhile, which `end_task` does again and again. Ends after
    `timeout_s` at the latest. A cancellation that came is raised afterwards."""
    task, cancelled = asyncio.create_task(last_call), False
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while not task.done() and loop.time() < ends_at:
        try:
            await asyncio.wait({task}, timeout=ends_at - loop.time())
        except asyncio.CancelledError:
            cancelled = True
    if not task.done():
        await end_task(task)
        raise TimeoutError(f"the last call did not end within {timeout_s:g} s")
    task.result()
    if cancelled:
        raise asyncio.CancelledError
