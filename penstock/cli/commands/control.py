"""`penstock runs`, `servers` and `policies`: tables of actions, each a call of the client and a printer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import add_gateway_arguments, open_client, run_folder
from penstock.cli.output import print_table, to_json
from penstock.cli.parser import Parser, RawHelpFormatter, whole_number
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
"""Metrics that the first line of a comparison has already."""

Action = tuple[str, Callable[..., Any], Callable[..., None]]
"""The help, the call with the client, the words and the limit, and what prints the records of its answer."""


def _run(argv: Sequence[str], prog: str, description: str, actions: Mapping[str, Action], limit_help: str = "") -> int:
    """Run one of the actions, whose keys have the words that they take: `pin VERSION NAME`. The first is the default.
    A VERSION becomes a number before the call. With the word in brackets, which may be omitted, the call gets no
    client."""
    width = max(map(len, actions)) + len(prog) + 3
    parser = Parser(
        prog=prog,
        description=description,
        epilog="\n".join(f"{f'{prog} {usage}':<{width}}{text}" for usage, (text, _, _) in actions.items()),
        formatter_class=RawHelpFormatter,
    )
    usages = {usage.split()[0]: usage for usage in actions}
    parser.add_argument(
        "action", nargs="?", default=next(iter(usages)), choices=usages, help="see below (default: %(default)s)"
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the action takes")
    add_gateway_arguments(parser)
    if limit_help:
        parser.add_argument("--limit", type=whole_number(1, MAX_LIMIT), default=20, metavar="N", help=limit_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    wanted = usages[args.action].split()[1:]
    num_needed = sum(not word.startswith("[") for word in wanted)
    if len(args.words) not in (num_needed, len(wanted)):
        missing = "which is missing" if len(wanted) == 1 else "not none"
        given = f"not {' '.join(args.words)!r}" if args.words else missing
        parser.error(f"{args.action} takes {' '.join(wanted) or 'no word'}, {given}; see `{prog} --help`")
    _, call, show = actions[usages[args.action]]
    is_offline = len(args.words) > num_needed
    if is_offline and (args.run_dir or args.url or args.run):
        parser.error(f"{wanted[-1][1:-1]} cannot be combined with --run-dir, --url and --run")
    opened: Any = nullcontext() if is_offline else open_client(args, DEADLINE_S)
    with opened as client:
        kinds = zip(wanted, args.words, strict=False)
        words = [_version(client, word) if kind == "VERSION" else word for kind, word in kinds]
        answer = call(client, words, getattr(args, "limit", 0))
    print(to_json(answer)) if args.json else show(*answer) if isinstance(answer, list | tuple) else show(answer)
    return 0


def _version(client: SyncPenstockClient, word: str) -> int:
    if word in LATEST:
        return client.policy().policy_version
    if not word.isdecimal():
        raise InvalidInput(repr(word), f"is not a version; give a number, or {LATEST[0]} for the newest")
    return int(word)


def runs(argv: Sequence[str]) -> int:
    actions: dict[str, Action] = {
        "show": ("show one run: its state, step and version", lambda c, *_: c.get_run(), _print_runs),
        "list": ("show all runs", lambda c, *_: c.runs(), _print_runs),
        "pause": ("stop leasing prompts", lambda c, *_: c.pause_run(), _print_runs),
        "resume": ("lease prompts again", lambda c, *_: c.resume_run(), _print_runs),
        "stop": ("end the learner after its step, with a checkpoint", lambda c, *_: c.stop_run(), _print_runs),
        "metrics [RUN]": (
            "show the newest steps; those of RUN, a name in runs/ or a folder, also when it is not up",
            lambda c, words, limit: c.metrics(limit) if c else _recorded_steps(words[0], limit),
            _print_metrics,
        ),
    }
    limit_help = "show the metrics of N steps (default: %(default)s)"
    return _run(argv, "penstock runs", "Show, list, pause, resume and stop runs.", actions, limit_help)


def _print_runs(*runs: Run) -> None:
    for run in runs:
        held = "" if run.held_version is None else f", servers held at version {run.held_version}"
        detail = f": {run.detail}" if run.detail else ""
        print(f"run {run.run} is {run.state.lower()} at step {run.step}, version {run.policy_version}{held}{detail}")


def _recorded_steps(run: str, limit: int) -> list[StepMetrics]:
    from penstock.api.records import StepMetrics
    from penstock.step_history import METRICS, read_steps

    return [
        StepMetrics(
            step=int(step["step"]), policy_version=int(step["policy_version"]),
            published_at_ms=int(1000 * step["time"]),
            metrics={name: value if math.isfinite(value) else None for name, value in step.items()},
        )
        for step in read_steps(run_folder(run, METRICS))[-limit:]
    ]  # fmt: skip


def _print_metrics(*steps: StepMetrics) -> None:
    rows = [(step.step, step.policy_version, *map(step.metrics.get, _STEP_METRICS)) for step in steps]
    print_table(("step", "version", *_STEP_METRICS.values()), rows, empty="no step yet")


def servers(argv: Sequence[str]) -> int:
    actions: dict[str, Action] = {
        "list": ("list the servers", lambda c, *_: c.servers(), _print_servers),
        "drain ID": ("let a server lease no prompts", lambda c, words, _: [c.drain_server(*words)], _print_servers),
        "undrain ID": ("let it lease again", lambda c, words, _: [c.undrain_server(*words)], _print_servers),
    }
    return _run(argv, "penstock servers", "List, drain and undrain the rollout servers of a run.", actions)


def _print_servers(*found: Server) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import ADDRESS_COLUMNS, server_alarms, server_table

    if not found:
        print("no rollout server has joined; see `penstock status`")
        return
    Console().print(server_table(found, ADDRESS_COLUMNS), *server_alarms(found), sep="\n")


def policies(argv: Sequence[str]) -> int:
    show = print_policies
    actions: dict[str, Action] = {
        "list": ("the newest versions", lambda c, _, limit: c.policies(page_size=limit).policies, show),
        "diff VERSION VERSION": (
            "what changed between two; `latest` is the newest, in every action",
            lambda c, words, _: c.compare_policies(*words), _print_comparison,
        ),
        "promote VERSION": ("mark a version as meant for use", lambda c, words, _: c.promote_policy(*words), show),
        "rewind VERSION": (
            "hold every rollout server at a version, from its snapshot",
            lambda c, words, _: c.rewind_policy(*words), show,
        ),
        "release": ("end a rewind: the servers get the newest version again", lambda c, *_: c.release_policy(), show),
        "retire VERSION": ("never use a version again", lambda c, words, _: c.retire_policy(*words), show),
        "pin VERSION NAME": (
            "serve the key, session or evaluation NAME with this version only, or keep the rollout server NAME at it",
            lambda c, words, _: c.pin_policy(words[1], words[0]), show,
        ),
        "unpin NAME": (
            "remove a pin", lambda c, words, _: {"was_pinned": c.unpin_policy(*words)},
            lambda answer: print("unpinned" if answer["was_pinned"] else "was not pinned"),
        ),
    }  # fmt: skip
    limit_help = "list at most N versions (default: %(default)s)"
    return _run(argv, "penstock policies", "List or change the policy versions of a run.", actions, limit_help)


def _print_comparison(comparison: PolicyComparison) -> None:
    before, after = comparison.policy, comparison.other
    weights = "the same weights" if comparison.same_weights else "different weights"
    print(
        f"version {before.policy_version} (step {before.step}, {_time(before.published_at_ms)} UTC) and version "
        f"{after.policy_version} (step {after.step}, {_time(after.published_at_ms)} UTC) have {weights}"
    )
    changes = {name: change for name, change in comparison.metric_changes.items() if name not in _NOT_COMPARED}
    rows = [(name, before.metrics[name], after.metrics[name], change) for name, change in sorted(changes.items())]
    columns = ("metric", f"version {before.policy_version}", f"version {after.policy_version}", "change")
    print_table(columns, rows, empty="the two have no metric in common: a learner's first version was made by no step")


def print_policies(*policies: Policy) -> None:
    rows = []
    for policy in policies:
        marks = [f"pinned: {', '.join(policy.pins)}"] if policy.pins else []
        state = "\n".join([policy.state.lower(), *(["held"] if policy.is_held else []), *marks])
        rows.append((
            policy.policy_version, policy.step, policy.metrics.get("reward_mean"), state,
            "kept" if policy.snapshot_path else "-", policy.weights_digest[:_DIGEST_LENGTH],
            _time(policy.published_at_ms), ", ".join(policy.server_ids),
        ))  # fmt: skip
    columns = ("version", "step", "reward", "state", "snapshot", "digest", "published (UTC)", "served by")
    print_table(columns, rows, whole=columns[4:7], empty="no policy version has been published yet")


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%m-%d %H:%M:%S")
