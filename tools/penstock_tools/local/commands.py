"""`penstock up` and `penstock demo`: the command lines. What they need is imported once they are parsed."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser, parse_with_overrides

DEMO_CONFIG = Path("examples/arithmetic/demo.yaml")
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C. It is not 0, because the run has not finished."""


def up(argv: Sequence[str] | None = None) -> int:
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
    from penstock.machine import keep_files_private
    from penstock.start_checks import doubts_about
    from penstock_tools.local.start_check import check_before_start, check_processes

    config = with_local_datasets(with_local_models(load_config(arguments.config, overrides)))
    for doubt in doubts_about(config):
        print(f"warning: {doubt}", flush=True)
    if arguments.check:
        check_before_start(config)
        for doubt in asyncio.run(check_processes(config)):
            print(f"warning: {doubt}", flush=True)
        print(f"{arguments.config}: ok")
        return 0
    from penstock_tools.local.supervisor import supervise

    keep_files_private()
    return INTERRUPTED if asyncio.run(supervise(config)) else 0


def demo(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock demo",
        description="Train a tiny model on arithmetic on this machine. Takes a few minutes; needs no GPU.",
        epilog="Any config field can be overridden: --learner.lr 1e-4",
    )
    parser.add_argument("--config", type=Path, default=None, help=f"YAML file (default: {DEMO_CONFIG})")
    arguments, overrides = parse_with_overrides(parser, argv)

    import asyncio
    import time

    from penstock.config.loading import load_config
    from penstock.machine import keep_files_private
    from penstock_tools.local.demo import run_demo

    config = load_config(arguments.config or _default_config(), overrides)
    if not any(word.split("=")[0] == "--run" for word in overrides):
        config = config.model_copy(update={"run": f"{config.run}-{time.strftime('%Y%m%d-%H%M%S')}"})
    keep_files_private()
    try:
        asyncio.run(run_demo(config))
    except asyncio.CancelledError:
        raise KeyboardInterrupt("before the demo was done; every process of it was stopped") from None
    return 0


def _default_config() -> Path:
    """The demo's config in this clone of the repository."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / DEMO_CONFIG).is_file():
            return folder / DEMO_CONFIG
    from penstock.errors import ConfigError

    raise ConfigError(f"{DEMO_CONFIG} was not found; run this in a clone of the repository, or give --config")
