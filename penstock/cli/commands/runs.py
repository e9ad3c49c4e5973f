"""`penstock runs`: show and control the runs of a gateway.

penstock runs                         show one run: its state, step and version
penstock runs list                    show all runs
penstock runs pause                   stop leasing prompts
penstock runs resume                  lease prompts again
penstock runs stop                    end the learner after its current step, with a checkpoint
penstock runs metrics                 show the metrics of the newest steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json
from penstock.cli.parser import Parser, RawHelpFormatter

if TYPE_CHECKING:
    from penstock.api.records import Run, StepMetrics
    from penstock.client import SyncPenstockClient

DEADLINE_S = 5.0
_EPILOG = (__doc__ or "").partition("\n\n")[2]
"""The table of actions above."""
_SHOWN = {"reward_mean": "reward", "staleness_mean": "staleness", "loss": "loss", "tokens_per_second": "tokens/s"}
_ACTIONS = ("show", "list", "metrics", "pause", "resume", "stop")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock runs",
        description="Show, list, pause, resume and stop runs.",
        epilog=_EPILOG,
        formatter_class=RawHelpFormatter,
    )
    parser.add_argument("action", nargs="?", default="show", choices=_ACTIONS)
    add_gateway_arguments(parser)
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="show the metrics of N steps (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with open_client(args, DEADLINE_S) as client:
        if args.action == "metrics":
            steps = client.metrics(args.limit)
            print(to_json(steps)) if args.json else _print_metrics(steps)
            return 0
        if args.action == "list":
            runs = client.runs()
            print(to_json(runs) if args.json else "\n".join(map(_line, runs)))
            return 0
        run = _change(client, args.action)
    print(to_json(run) if args.json else _line(run))
    return 0


def _change(client: SyncPenstockClient, action: str) -> Run:
    changes = {"pause": client.pause_run, "resume": client.resume_run, "stop": client.stop_run}
    return changes.get(action, client.get_run)()


def _line(run: Run) -> str:
    held = "" if run.held_version is None else f", servers held at version {run.held_version}"
    detail = f": {run.detail}" if run.detail else ""
    return f"run {run.run} is {run.state.lower()} at step {run.step}, version {run.policy_version}{held}{detail}"


def _print_metrics(steps: Sequence[StepMetrics]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not steps:
        Console().print("no step yet")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("step", "version", *_SHOWN.values()):
        table.add_column(name, justify="right")
    for step in steps:
        values = (step.metrics.get(name) for name in _SHOWN)
        cells = ("-" if value is None else f"{value:.4g}" for value in values)
        table.add_row(str(step.step), str(step.policy_version), *cells)
    Console().print(table)
