"""`penstock feed --config RUN.yaml`: submit the dataset of a config file to its run, and validate beside it.

Talks to Redis itself. Start it again after it was killed: it goes on where it stood. `penstock up` does the same work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock feed",
        description="Submit the dataset of a config file to its run, epoch by epoch; safe to stop and start again.",
        epilog="Any field of the config may follow as an override: --dataset.epochs 3",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    args, overrides = parser.parse_known_args(argv)

    import asyncio

    from penstock.config.checks import check_datasets
    from penstock.config.loading import load_config
    from penstock.errors import ConfigError
    from penstock.logs import setup_logging

    config = load_config(args.config, overrides)
    if not config.redis.url:
        raise ConfigError("redis.url is not set; `penstock up` feeds the runs whose Redis it starts itself")
    from penstock.feeding_run import check_fed, feed_run

    if args.check:
        check_fed(config)
        check_datasets(config)
        print(f"{args.config}: ok (feed)")
        return 0
    setup_logging("feed", config.run)

    asyncio.run(feed_run(config))
    return 0


if __name__ == "__main__":
    from penstock.cli.main import main as penstock

    raise SystemExit(penstock(["feed", *sys.argv[1:]]))
