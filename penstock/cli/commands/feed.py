"""`penstock feed --config RUN.yaml`: submit the dataset of a config file to its run, and run its validations.

It talks to Redis directly. If it is killed, start it again: it continues from the stored position.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from penstock.cli.parser import parse_with_overrides, process_parser, run_interruptible

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM. It is not 0, because not everything was submitted."""


def main(argv: Sequence[str]) -> int:
    about = "Submit the dataset of a config file to its run, epoch by epoch. Safe to stop and start again."
    parser = process_parser("feed", about, "--dataset.epochs 3")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="stay until the run has finished, and pause it if its prompts are dead-lettered",
    )
    args, overrides = parse_with_overrides(parser, argv)

    from penstock.cli.connection import load_started_config
    from penstock.logs import setup_logging
    from penstock.machine import keep_files_private
    from penstock.start_checks import check_datasets, check_first_rows

    config = load_started_config(args.config, overrides)
    from penstock.feed.feed_process import check_fed, feed_run
    from penstock.hub import with_local_datasets

    check_fed(config)
    config = with_local_datasets(config)
    if args.check:
        check_datasets(config)
        check_first_rows(config)
        print(f"{args.config}: ok (feed)")
        return 0
    setup_logging("feed", config.run)
    keep_files_private()

    try:
        feeding = _until_terminated(feed_run(config, watch=args.watch))
        run_interruptible(feeding, "while it fed the run; the same command continues")
    except asyncio.CancelledError:
        return TERMINATED
    return 0


async def _until_terminated(feeding: Coroutine[Any, Any, None]) -> None:
    """Cancel the feed on SIGTERM, so that a server that is held for a validation is released."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await feeding


if __name__ == "__main__":
    from penstock.cli.main import main as penstock

    raise SystemExit(penstock(["feed", *sys.argv[1:]]))
