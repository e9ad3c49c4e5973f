"""`penstock up CONFIG`: start every process of a run on this machine and supervise them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock up",
        description="Start Redis, the gateway, rollout servers and the learner of a config file on this machine. "
        "Ctrl-C stops them; the same command continues the run.",
        epilog="Any config field can be overridden: --learner.num_steps 200. docs/config.md lists all fields.",
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    arguments, overrides = parser.parse_known_args(argv)

    import asyncio

    from penstock.config.loading import load_config
    from penstock.private_files import keep_files_private
    from penstock.start_checks import doubts_about
    from penstock_services.local.start_check import check_before_start, check_processes
    from penstock_services.local.supervisor import supervise

    config = load_config(arguments.config, overrides)
    for doubt in doubts_about(config):
        print(f"warning: {doubt}", flush=True)
    if arguments.check:
        check_before_start(config)
        asyncio.run(check_processes(config))
        print(f"{arguments.config}: ok")
        return 0
    keep_files_private()
    asyncio.run(supervise(config))
    return 0
