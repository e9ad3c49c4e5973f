"""Commands that show and change a run through its gateway: `penstock runs`, `servers` and `policies`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.output import to_json
from penstock.cli.parser import Parser, RawHelpFormatter
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.api.records import Policy, PolicyComparison, Run, Server, StepMetrics
    from penstock.client import SyncPenstockClient

DEADLINE_S = 5.0
MAX_LIMIT = 1000
LATEST = ("latest", "current")
_DIGEST_LENGTH = 8
_STEP_METRICS = {
    "reward_mean": "reward", "staleness_mean": "staleness", "loss": "loss", "tokens_per_second": "tokens/s",
}  # fmt: skip
_NOT_COMPARED = ("time", "step", "policy_version")
"""Metrics that the first line of a comparison says better."""

_RUN_ACTIONS = """\
penstock runs                         show one run: its state, step and version
penstock runs list                    show all runs
penstock runs pause                   stop leasing prompts
penstock runs resume                  lease prompts again
penstock runs stop                    end the learner after its current step, with a checkpoint
penstock runs metrics                 show the metrics of the newest steps
"""
_POLICY_ACTIONS = """\
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
_POLICY_WORDS = {
    "list": (), "diff": ("VERSION", "VERSION"), "promote": ("VERSION",), "rollback": ("VERSION",), "release": (),
    "retire": ("VERSION",), "pin": ("VERSION", "NAME"), "unpin": ("NAME",),
}  # fmt: skip
"""Actions, and the words that each takes."""


# ── runs ──


def runs(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock runs",
        description="Show, list, pause, resume and stop runs.",
        epilog=_RUN_ACTIONS,
        formatter_class=RawHelpFormatter,
    )
    actions = ("show", "list", "metrics", "pause", "resume", "stop")
    parser.add_argument("action", nargs="?", default="show", choices=actions)
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
        elif args.action == "list":
            found = client.runs()
            print(to_json(found) if args.json else "\n".join(map(_run_line, found)))
        else:
            changes = {"pause": client.pause_run, "resume": client.resume_run, "stop": client.stop_run}
            run = changes.get(args.action, client.get_run)()
            print(to_json(run) if args.json else _run_line(run))
    return 0


def _run_line(run: Run) -> str:
    held = "" if run.held_version is None else f", servers held at version {run.held_version}"
    detail = f": {run.detail}" if run.detail else ""
    return f"run {run.run} is {run.state.lower()} at step {run.step}, version {run.policy_version}{held}{detail}"


def _print_metrics(steps: Sequence[StepMetrics]) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import plain_table

    if not steps:
        Console().print("no step yet")
        return
    columns = ("step", "version", *_STEP_METRICS.values())
    table = plain_table(*columns, right=columns)
    for step in steps:
        values = (step.metrics.get(name) for name in _STEP_METRICS)
        table.add_row(str(step.step), str(step.policy_version), *map(_number, values))
    Console().print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.4g}"  # no -0


# ── servers ──


def servers(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock servers",
        description="List, drain and undrain rollout servers. A drained server leases no prompts.",
    )
    parser.add_argument("action", nargs="?", default="list", choices=("list", "drain", "undrain"))
    parser.add_argument("server_id", nargs="?", help="server to drain or undrain")
    add_gateway_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if (args.action == "list") == bool(args.server_id):
        raise InvalidInput("server_id", "`drain` and `undrain` need a server id, and `list` takes none")
    with open_client(args, DEADLINE_S) as client:
        if args.action == "list":
            found = client.servers()
        else:
            change = client.drain_server if args.action == "drain" else client.undrain_server
            found = [change(args.server_id)]
    print(to_json(found)) if args.json else _print_servers(found)
    return 0


def _print_servers(found: Sequence[Server]) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import ADDRESS_COLUMNS, server_alarms, server_table

    console = Console()
    if not found:
        console.print("no rollout server has joined; see `penstock status`")
        return
    console.print(server_table(found, ADDRESS_COLUMNS))
    for line in server_alarms(found):
        console.print(line)


# ── policies ──


def policies(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock policies",
        description="List the policy versions of a run, or change one.",
        epilog=_POLICY_ACTIONS,
        formatter_class=RawHelpFormatter,
    )
    parser.add_argument("action", nargs="?", default="list", choices=_POLICY_WORDS, help="(default: %(default)s)")
    parser.add_argument("words", nargs="*", metavar="VERSION | NAME", help="see the actions below")
    add_gateway_arguments(parser)
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="list at most N versions (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 1 <= args.limit <= MAX_LIMIT:
        raise InvalidInput("--limit", f"must be between 1 and {MAX_LIMIT}")
    if len(args.words) != len(wanted := _POLICY_WORDS[args.action]):
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
        found = client.policies(page_size=args.limit).policies
        print(to_json(found)) if args.json else print_policies(found)
    elif args.action == "diff":
        comparison = client.compare_policies(_version(client, words[0]), _version(client, words[1]))
        print(to_json(comparison)) if args.json else _print_comparison(comparison)
    elif args.action == "unpin":
        was_pinned = client.unpin_policy(words[0])
        text = "unpinned" if was_pinned else "was not pinned"
        print(json.dumps({"was_pinned": was_pinned}) if args.json else text)
    else:
        policy = _change(client, args.action, words)
        print(to_json(policy)) if args.json else print_policies([policy])


def _change(client: SyncPenstockClient, action: str, words: Sequence[str]) -> Policy:
    if action == "release":
        return client.release_policy()
    version = _version(client, words[0])
    if action == "pin":
        return client.pin_policy(words[1], version)
    changes = {
        "promote": client.promote_policy, "rollback": client.roll_back_policy, "retire": client.retire_policy,
    }  # fmt: skip
    return changes[action](version)


def _version(client: SyncPenstockClient, word: str) -> int:
    if word in LATEST:
        return client.policy().policy_version
    if not word.isdecimal():
        raise InvalidInput(repr(word), f"is not a version; give a number, or {LATEST[0]} for the newest")
    return int(word)


def _print_comparison(comparison: PolicyComparison) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import plain_table

    before, after = comparison.policy, comparison.other
    weights = "the same weights" if comparison.same_weights else "different weights"
    console = Console()
    console.print(
        f"version {before.policy_version} (step {before.step}, {_time(before.published_at_ms)} UTC) and version "
        f"{after.policy_version} (step {after.step}, {_time(after.published_at_ms)} UTC) have {weights}"
    )
    changes = {name: change for name, change in comparison.metric_changes.items() if name not in _NOT_COMPARED}
    if not changes:
        console.print("the two have no metric in common: a version that a learner started from was made by no step")
        return
    columns = (f"version {before.policy_version}", f"version {after.policy_version}", "change")
    table = plain_table("metric", *columns, right=columns)
    for name, change in sorted(changes.items()):
        table.add_row(name, *map(_number, (before.metrics[name], after.metrics[name], change)))
    console.print(table)


def print_policies(found: Sequence[Policy]) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import plain_table

    if not found:
        Console().print("no policy version has been published yet")
        return
    numbers, whole = ("version", "step", "reward"), ("snapshot", "digest", "published (UTC)")
    table = plain_table(*numbers, "state", *whole, "served by", right=numbers, whole=whole)
    for policy in found:
        marks = [f"pinned: {', '.join(policy.pins)}"] if policy.pins else []
        state = "\n".join([policy.state.lower(), *(["held"] if policy.is_held else []), *marks])
        reward = policy.metrics.get("reward_mean")
        table.add_row(
            str(policy.policy_version), str(policy.step), "-" if reward is None else f"{reward:.4f}", state,
            "kept" if policy.snapshot_path else "-", policy.weights_digest[:_DIGEST_LENGTH],
            _time(policy.published_at_ms), ", ".join(policy.server_ids),
        )  # fmt: skip
    Console().print(table)


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%m-%d %H:%M:%S")
