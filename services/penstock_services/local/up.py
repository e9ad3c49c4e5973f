"""`penstock up CONFIG`: start the parts of a config file on this machine and watch over them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock up",
        description="Start Redis, gateway, rollout servers and learner of a config file on this machine.",
        epilog="Any field of the config may follow as an override: --learner.num_steps 200",
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    arguments, overrides = parser.parse_known_args(argv)

    import asyncio

    from penstock.config.loading import load_config
    from penstock_services.local.local_run import check_before_start
    from penstock_services.local.watch import watch

    config = load_config(arguments.config, overrides)
    if arguments.check:
        check_before_start(config)
        print(f"{arguments.config}: ok")
        return 0
    asyncio.run(watch(config))
    return 0
