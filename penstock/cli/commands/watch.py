"""`penstock watch`: print a line for each prompt that finishes. `--cursor` continues after an earlier line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.interruption import interruptible
from penstock.cli.json_output import to_json
from penstock.cli.parser import Parser

if TYPE_CHECKING:
    from penstock.api.records import Result

DEADLINE_S = 60.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock watch", description="Print the results of a run as they arrive. Press Ctrl-C to end."
    )
    add_gateway_arguments(parser)
    parser.add_argument(
        "--cursor", default="", help="start after this result; 0 starts with the oldest (default: new results only)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N results")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with the groups")
    args = parser.parse_args(argv)
    with open_client(args, DEADLINE_S) as client, interruptible("while it waited for results"):
        for number, result in enumerate(client.results(args.cursor, with_groups=True), 1):
            print(to_json(result, indent=None) if args.json else _line(result), flush=True)
            if number == args.limit:
                break
    return 0


def _line(result: Result) -> str:
    words = [result.cursor, f"prompt {result.prompt_id}", result.state, result.reason]
    if result.group is not None:
        rewards = " ".join(f"{trajectory.reward:g}" for trajectory in result.group.trajectories)
        words.append(f"rewards {rewards} by {result.group.server_id}")
    return "  ".join(word for word in words if word)
