"""`penstock policies`: list the policy versions of a run, compare them, and choose which one is served.

penstock policies                     the newest versions
penstock policies diff 3 latest       what changed between two; `latest` is the newest, in every action
penstock policies promote 7           mark a version as meant for use
penstock policies rollback 3          hold every rollout server at a version, from its snapshot
penstock policies release             end the roll back
penstock policies retire 2            never use a version again
penstock policies pin 3 NAME          serve the key, session or evaluation NAME with this version only, or keep the
                                      rollout server NAME at it
penstock policies unpin NAME          remove a pin
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json
from penstock.cli.parser import Parser, RawHelpFormatter
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.api.records import Policy, PolicyComparison
    from penstock.client import SyncPenstockClient

DEADLINE_S = 5.0
_EPILOG = (__doc__ or "").partition("\n\n")[2]
"""The table of actions above."""
MAX_LIMIT = 1000
LATEST = ("latest", "current")
_DIGEST_LENGTH = 8
_NOT_COMPARED = ("time", "step", "policy_version")
"""Metrics that the first line of a comparison says better."""
_ACTIONS = {
    "list": (), "diff": ("VERSION", "VERSION"), "promote": ("VERSION",), "rollback": ("VERSION",), "release": (),
    "retire": ("VERSION",), "pin": ("VERSION", "NAME"), "unpin": ("NAME",),
}  # fmt: skip
"""Actions, and the words that each takes."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock policies",
        description="List the policy versions of a run, or change one.",
        epilog=_EPILOG,
        formatter_class=RawHelpFormatter,
    )
    parser.add_argument("action", nargs="?", default="list", choices=_ACTIONS, help="(default: %(default)s)")
    parser.add_argument("words", nargs="*", metavar="VERSION | NAME", help="see the actions below")
    add_gateway_arguments(parser)
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="list at most N versions (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 1 <= args.limit <= MAX_LIMIT:
        raise InvalidInput("--limit", f"must be between 1 and {MAX_LIMIT}")
    if len(args.words) != len(wanted := _ACTIONS[args.action]):
        given = (
            f"not {' '.join(args.words)!r}" if args.words else "which is missing" if len(wanted) == 1 else "not none"
        )
        parser.error(f"{args.action} takes {' '.join(wanted) or 'no word'}, {given}; see `penstock policies --help`")
    with open_client(args, DEADLINE_S) as client:
        _act(client, args)
    return 0


def _act(client: SyncPenstockClient, args: argparse.Namespace) -> None:
    words = args.words
    if args.action == "list":
        policies = client.policies(page_size=args.limit).policies
        print(to_json(policies)) if args.json else _print(policies)
    elif args.action == "diff":
        comparison = client.compare_policies(_version(client, words[0]), _version(client, words[1]))
        print(to_json(comparison)) if args.json else _print_comparison(comparison)
    elif args.action == "unpin":
        was_pinned = client.unpin_policy(words[0])
        text = "unpinned" if was_pinned else "was not pinned"
        print(json.dumps({"was_pinned": was_pinned}) if args.json else text)
    else:
        policy = _change(client, args.action, words)
        print(to_json(policy)) if args.json else _print([policy])


def _change(client: SyncPenstockClient, action: str, words: Sequence[str]) -> Policy:
    if action == "promote":
        return client.promote_policy(_version(client, words[0]))
    if action == "rollback":
        return client.roll_back_policy(_version(client, words[0]))
    if action == "retire":
        return client.retire_policy(_version(client, words[0]))
    if action == "pin":
        return client.pin_policy(words[1], _version(client, words[0]))
    return client.release_policy()


def _version(client: SyncPenstockClient, word: str) -> int:
    if word in LATEST:
        return client.policy().policy_version
    if not word.isdecimal():
        raise InvalidInput(repr(word), f"is not a version; give a number, or {LATEST[0]} for the newest")
    return int(word)


def _print_comparison(comparison: PolicyComparison) -> None:
    from rich.console import Console
    from rich.table import Table

    before, after = comparison.policy, comparison.other
    weights = "the same weights" if comparison.same_weights else "different weights"
    console = Console()
    console.print(
        f"version {before.policy_version} (step {before.step}, {_time(before.published_at_ms)} UTC) and version "
        f"{after.policy_version} (step {after.step}, {_time(after.published_at_ms)} UTC) have {weights}"
    )
    changes = {name: change for name, change in comparison.metric_changes.items() if name not in _NOT_COMPARED}
    if not changes:
        console.print("no metric is known of both: a version that a learner started from was made by no step")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("metric", overflow="fold")
    for policy in (before, after):
        table.add_column(f"version {policy.policy_version}", justify="right")
    table.add_column("change", justify="right")
    for name, change in sorted(changes.items()):
        values = (before.metrics[name], after.metrics[name], change)
        table.add_row(name, *("-" if value is None else f"{value + 0.0:.4g}" for value in values))  # no -0
    console.print(table)


def _print(policies: Sequence[Policy]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not policies:
        Console().print("no policy version has been published yet")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("version", "step", "reward"):
        table.add_column(name, justify="right")
    for name in ("state", "snapshot", "digest", "published (UTC)", "served by"):
        table.add_column(name, overflow="fold", no_wrap=name in ("snapshot", "digest", "published (UTC)"))
    for policy in policies:
        table.add_row(
            str(policy.policy_version), str(policy.step), _reward(policy.metrics),
            _state(policy), "kept" if policy.snapshot_path else "-", policy.weights_digest[:_DIGEST_LENGTH],
            _time(policy.published_at_ms), ", ".join(policy.server_ids),
        )  # fmt: skip
    Console().print(table)


def _state(policy: Policy) -> str:
    marks = [f"pinned: {', '.join(policy.pins)}"] if policy.pins else []
    return "\n".join([policy.state.lower(), *(["held"] if policy.is_held else []), *marks])


def _reward(metrics: dict[str, float | None]) -> str:
    value = metrics.get("reward_mean")
    return "-" if value is None else f"{value:.4f}"


def _time(milliseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%m-%d %H:%M:%S")
