"""`penstock up CONFIG`: start the parts of a config file on this machine and watch over them."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock_services.local.local_run import LocalRun

POLL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock up",
        description="Start Redis, gateway, rollout servers and learner of a config file on this machine.",
        epilog="Any field of the config may follow as an override: --learner.num_steps 200",
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    arguments, overrides = parser.parse_known_args(argv)
    asyncio.run(up(load_config(arguments.config, overrides)))
    return 0


async def up(config: RunConfig) -> None:
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
