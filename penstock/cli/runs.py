"""`penstock runs`: pause, resume or stop a run; its metrics by step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from penstock.cli.connection import add_gateway_arguments, open_client

DEADLINE_S = 5.0
_SHOWN = ("reward_mean", "staleness_mean", "loss", "tokens_per_second")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock runs", description="Show or change a run.")
    parser.add_argument("action", nargs="?", default="show", choices=("show", "metrics", "pause", "resume", "stop"))
    add_gateway_arguments(parser)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="steps of metrics (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with open_client(args, DEADLINE_S) as client:
        if args.action == "metrics":
            steps = client.metrics(args.limit)
            print(json.dumps(steps, indent=2)) if args.json else _print_metrics(steps)
            return 0
        changes = {"pause": client.pause_run, "resume": client.resume_run, "stop": client.stop_run}
        run = changes.get(args.action, client.get_run)()
    held = "" if run["held_version"] is None else f", servers held at version {run['held_version']}"
    line = f"run {run['run']} is {run['state'].lower()} at step {run['step']}, version {run['policy_version']}{held}"
    print(json.dumps(run, indent=2) if args.json else line)
    return 0


def _print_metrics(steps: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("step", "version", *_SHOWN):
        table.add_column(name, justify="right")
    for step in steps:
        values = (step["metrics"].get(name) for name in _SHOWN)
        cells = ("-" if value is None else f"{value:.4g}" for value in values)
        table.add_row(str(step["step"]), str(step["policy_version"]), *cells)
    Console().print(table)
