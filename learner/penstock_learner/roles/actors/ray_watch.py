"""Ends the learner soon after the Ray that it runs on has died, with one line that says so.

Ray itself would go on for a minute without its gcs, and then abort this process with a stack trace of its own. When the
raylet dies, the ranks die with it, and there is nothing to restart them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray

from penstock.cancellation import end_task
from penstock.errors import RayDied

NEEDED = ("gcs_server", "raylet")
"""The processes of a private Ray without which nothing works."""
POLL_S = 0.5
UNREACHABLE_S = 40.0
"""How long the gcs of a joined cluster may be unreachable, for example while its pod restarts. Ray waits for 60 s."""
CONNECT_S = 5.0
END_S = 10.0
"""How long the learner's own work may take to end after Ray has died."""


async def run_while_ray_lives(work: Coroutine[Any, Any, None]) -> None:
    """Do the work. Raises RayDied, and gives the work up, when Ray dies. Call it when Ray is up."""
    own = own_processes()
    await run_beside(work, watch_processes(own) if own else watch_address(ray.get_runtime_context().gcs_address))


async def run_beside(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, NoReturn]) -> None:
    """Do the work until it ends, or until the watch raises."""
    working, watching = asyncio.create_task(work), asyncio.create_task(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception():
            # The work may have failed because Ray died a moment ago. Then that explains its error.
            await asyncio.wait({watching}, timeout=3 * POLL_S)
        await (watching if watching.done() else working)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await end_task(working)
        await end_task(watching)


def own_processes() -> dict[str, psutil.Process]:
    """The needed processes of the private Ray that this process has started. Empty on a cluster that it joined."""
    found = {}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, IndexError):
            name = Path(process.cmdline()[0]).name
            if name in NEEDED:
                found[name] = process
    return found


async def watch_processes(processes: Mapping[str, psutil.Process]) -> NoReturn:
    """Raise RayDied when one of the processes has ended."""
    while True:
        for name, process in processes.items():
            if _has_ended(process):
                raise RayDied(
                    f"Ray's {name} has ended, and the ranks cannot work without it; check that the machine has free "
                    "memory, then start the learner again; it continues from its last checkpoint, and no group is lost"
                )
        await asyncio.sleep(POLL_S)


async def watch_address(address: str, unreachable_s: float = UNREACHABLE_S) -> NoReturn:
    """Raise RayDied when the gcs of a joined cluster has been unreachable for a while."""
    reached_at = time.monotonic()
    while True:
        if await _is_reachable(address):
            reached_at = time.monotonic()
        elif time.monotonic() - reached_at >= unreachable_s:
            raise RayDied(
                f"Ray's gcs at {address} has not been reachable for {unreachable_s:.0f} s; check the head of the Ray "
                "cluster (learner.ray_address), then start the learner again; it continues from its last checkpoint, "
                "and no group is lost"
            )
        await asyncio.sleep(POLL_S)


def kill_own_processes() -> None:
    """Kill what is left of the private Ray that this process has started."""
    for process in own_processes().values():
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


async def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        return True
    return False
