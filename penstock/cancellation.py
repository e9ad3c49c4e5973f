"""Reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

RECANCEL_S = 0.5


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended. Its result or exception is ignored.

    The cancellation is repeated, because before Python 3.12 `asyncio.wait_for`, which client libraries use, can swallow
    one."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=RECANCEL_S)
    with contextlib.suppress(asyncio.CancelledError, Exception):
        task.result()
