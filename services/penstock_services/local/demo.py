"""`penstock demo`: train a tiny model on arithmetic on this machine, end to end, and show that it learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.overrides import parse_with_overrides
from penstock.cli.parser import Parser

DEFAULT_CONFIG = Path("examples/arithmetic/demo.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock demo",
        description="Train a tiny model on arithmetic on this machine. Takes a few minutes; needs no GPU.",
        epilog="Any config field can be overridden: --learner.lr 1e-4",
    )
    parser.add_argument("--config", type=Path, default=None, help=f"YAML file (default: {DEFAULT_CONFIG})")
    arguments, overrides = parse_with_overrides(parser, argv)

    import asyncio
    import time

    from penstock.config.loading import load_config
    from penstock.machine.private_files import keep_files_private
    from penstock_services.local.training_demo import demo

    config = load_config(arguments.config or _default_config(), overrides)
    if not any(word.split("=")[0] == "--run" for word in overrides):
        config = config.model_copy(update={"run": f"{config.run}-{time.strftime('%Y%m%d-%H%M%S')}"})
    keep_files_private()
    try:
        asyncio.run(demo(config))
    except asyncio.CancelledError:
        raise KeyboardInterrupt("before the demo was done; every process of it was stopped") from None
    return 0


def _default_config() -> Path:
    """The demo's config in this clone of the repository."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / DEFAULT_CONFIG).is_file():
            return folder / DEFAULT_CONFIG
    from penstock.errors import ConfigError

    raise ConfigError(f"{DEFAULT_CONFIG} was not found; run this in a clone of the repository, or give --config")
