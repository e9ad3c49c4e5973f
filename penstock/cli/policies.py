"""`penstock policies`: the newest policy versions of a run and who serves them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.errors import InvalidInput

DEADLINE_S = 5.0
MAX_LIMIT = 1000
_DIGEST_LENGTH = 12


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock policies", description="List the newest policy versions of a run.")
    add_gateway_arguments(parser)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 1 <= args.limit <= MAX_LIMIT:
        raise InvalidInput("--limit", f"must be between 1 and {MAX_LIMIT}")
    with open_client(args, DEADLINE_S) as client:
        policies = client.policies(page_size=args.limit)["policies"]
    if args.json:
        print(json.dumps(policies, indent=2))
    else:
        _print(policies)
    return 0


def _print(policies: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not policies:
        Console().print("no policy version was published yet")
        return
    table = Table()
    for name in ("version", "step", "reward"):
        table.add_column(name, justify="right")
    for name in ("digest", "published (UTC)", "served by"):
        table.add_column(name)
    for policy in policies:
        table.add_row(
            str(policy["policy_version"]), str(policy["step"]), _reward(policy["metrics"]),
            policy["weights_digest"][:_DIGEST_LENGTH], _time(policy["published_at_ms"]),
            ", ".join(policy["server_ids"]),
        )  # fmt: skip
    Console().print(table)


def _reward(metrics: dict[str, float | None]) -> str:
    value = metrics.get("reward_mean")
    return "-" if value is None else f"{value:.4f}"


def _time(milliseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
