"""The rollout server process: `python -m penstock_rollout --config run.yaml --server-id rollout-0 [--check]`."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Sequence

from penstock.cli.parser import parse_with_overrides, process_parser
from penstock.errors import PenstockError, described, first_error
from penstock.logs import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    about = "Run one rollout server, which samples responses and scores them. `penstock up` starts it with the others."
    parser = process_parser("rollout", about, "--rollout.max_concurrent_groups 64")
    parser.add_argument("--server-id", default="rollout-0", help="name of the server in the fleet")
    arguments, overrides = parse_with_overrides(parser, argv)
    from penstock.config.loading import load_config
    from penstock.hub import with_local_model
    from penstock.machine import keep_compiled_code, keep_files_private
    from penstock.start_checks import make_run_folder
    from penstock.store.keys import check_name

    try:
        check_name("--server-id", arguments.server_id)
        config = load_config(arguments.config, overrides)
        setup_logging(arguments.server_id, config.run)
        config = with_local_model(config)
        if arguments.check:
            from penstock_rollout.start_check import check

            engine = check(config)
            print(f"{arguments.config}: ok (rollout server {arguments.server_id}, engine {engine})")
            return 0
        keep_files_private()
        make_run_folder(config)
        keep_compiled_code(config.cache_folder)
        from penstock_rollout.server import serve

        asyncio.run(serve(config, arguments.server_id))
        return 0
    except* PenstockError as errors:
        print(f"penstock rollout: error: {first_error(errors)}", file=sys.stderr)
    except* Exception as errors:
        traceback.print_exception(errors)
        print(f"penstock rollout: error: {described(first_error(errors))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
