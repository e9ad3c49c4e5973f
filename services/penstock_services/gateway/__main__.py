"""`python -m penstock_services.gateway --config run.yaml`: one gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cli.parser import parse_with_overrides, process_parser
from penstock.errors import PenstockError, first_error
from penstock.machine import freeze_loaded_objects, raise_file_limit

COLLECTED_OBJECTS = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    about = "Run one gateway: REST, gRPC and the console of a run. `penstock up` starts it with the others."
    parser = process_parser("gateway", about, "--gateway.port 8080")
    args, overrides = parse_with_overrides(parser, argv)
    try:
        return _run(args.config, overrides, check_only=args.check)
    except* PenstockError as errors:
        print(f"penstock gateway: error: {first_error(errors)}", file=sys.stderr)
    return 2


def _run(path: Path, overrides: Sequence[str], check_only: bool) -> int:
    from penstock.config.loading import load_config
    from penstock.logs import setup_logging
    from penstock.machine import keep_files_private
    from penstock_services.gateway.server import check, serve

    config = load_config(path, overrides)
    if check_only:
        check(config)
        print(f"{path}: ok")
        return 0
    setup_logging("gateway", config.run)
    # Reference counts free the thousands of objects of a request. With its defaults the collector would scan all of
    # them, and what is imported, every few requests and find nothing.
    freeze_loaded_objects()
    gc.set_threshold(COLLECTED_OBJECTS, 20, 20)
    raise_file_limit()
    keep_files_private()
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ModuleNotFoundError):  # uvloop halves the cost of a request
        loop_factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
