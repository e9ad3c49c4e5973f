"""`penstock up CONFIG`: start every process of a run on this machine and supervise them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.overrides import parse_with_overrides
from penstock.cli.parser import Parser

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C. It is not 0, because the run has not finished."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock up",
        description="Start Redis, the gateway, rollout servers and the learner of a config file on this machine. "
        "Ctrl-C stops them; the same command continues the run.",
        epilog="Any config field can be overridden: --learner.num_steps 200. docs/config.md lists all fields.",
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    arguments, overrides = parse_with_overrides(parser, argv)

    import asyncio

    from penstock.config.loading import load_config
    from penstock.hub import with_local_datasets, with_local_models
    from penstock.machine.private_files import keep_files_private
    from penstock.start_checks import doubts_about
    from penstock_services.local.start_check import check_before_start, check_processes

    config = with_local_datasets(with_local_models(load_config(arguments.config, overrides)))
    for doubt in doubts_about(config):
        print(f"warning: {doubt}", flush=True)
    if arguments.check:
        check_before_start(config)
        for doubt in asyncio.run(check_processes(config)):
            print(f"warning: {doubt}", flush=True)
        print(f"{arguments.config}: ok")
        return 0
    from penstock_services.local.supervisor import supervise

    keep_files_private()
    return INTERRUPTED if asyncio.run(supervise(config)) else 0
