"""Watching over a local run until its learner has finished."""

from __future__ import annotations

import asyncio
import signal

from penstock.config.run import RunConfig
from penstock_services.local.local_run import LocalRun

POLL_S = 0.5


async def watch(config: RunConfig) -> None:
    """Run until the learner has its last step, a part dies, or a signal asks to stop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with LocalRun(config) as run:
        run.start_workers()
        print(f"run {config.run}: REST {run.client.address.url}, logs and checkpoints in {run.folder}")
        while not stopping.is_set() and not run.learner_finished:
            run.check()
            await asyncio.sleep(POLL_S)
        print("the learner has finished; stopping" if run.learner_finished else "stopping")
