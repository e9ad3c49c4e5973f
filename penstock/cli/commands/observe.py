"""Commands that show a run and change nothing: `penstock status`, `top` and `watch`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.output import to_json
from penstock.cli.parser import Parser, interruptible
from penstock.errors import Unavailable

if TYPE_CHECKING:
    from penstock.api.records import Result, Run
    from penstock.client import SyncPenstockClient

DEADLINE_S = 5.0
WATCH_DEADLINE_S = 60.0
HISTORY = 60


def status(argv: Sequence[str]) -> int:
    parser = Parser(prog="penstock status", description="Show the state of a run: step, version, queue, servers.")
    add_gateway_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with open_client(args, DEADLINE_S) as client:
        run = client.get_run()
    if args.json:
        print(to_json(run))
        return 0
    from rich.console import Console

    from penstock.diagnosis.terminal import run_parts

    Console().print(*run_parts(run), sep="\n")
    return 0


def watch(argv: Sequence[str]) -> int:
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
    with open_client(args, WATCH_DEADLINE_S) as client, interruptible("while it waited for results"):
        for number, result in enumerate(client.results(args.cursor, with_groups=True), 1):
            print(to_json(result, indent=None) if args.json else _result_line(result), flush=True)
            if number == args.limit:
                break
    return 0


def _result_line(result: Result) -> str:
    words = [result.cursor, f"prompt {result.prompt_id}", result.state, result.reason]
    if result.group is not None:
        rewards = " ".join(f"{trajectory.reward:g}" for trajectory in result.group.trajectories)
        words.append(f"rewards {rewards} by {result.group.server_id}")
    return "  ".join(word for word in words if word)


def top(argv: Sequence[str]) -> int:
    """Watch a run. The numbers come from the gateway's API and its /metrics."""
    parser = Parser(
        prog="penstock top", description="Watch a run: steps, queue, servers and components. Press Ctrl-C to end."
    )
    add_gateway_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    from rich.console import Console
    from rich.live import Live

    with open_client(args, DEADLINE_S) as client:
        console = Console()
        if args.once:
            console.print(_draw(*_read(client)))
            return 0
        screen = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext()
        with interruptible("after it watched the run"), screen as live:
            while True:
                if live is None:  # a file or a pipe, which has no screen to draw on
                    console.print(_draw(*_read(client)))
                else:
                    live.update(_draw(*_read(client)), refresh=True)
                time.sleep(max(args.interval, 0.1))


def _read(client: SyncPenstockClient) -> tuple[Run, dict[str, dict[str, float]], list[float]]:
    """The run, the gateway's metrics as `parse_series` reads them, and the mean reward of the newest steps."""
    import httpx

    url = f"{client.address.url}/metrics"
    run = client.get_run()
    try:
        answer = httpx.get(url, timeout=DEADLINE_S, trust_env=False, verify=client.verify)
        text = answer.raise_for_status().text
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} does not answer ({error}); is it a gateway?") from error
    return run, parse_series(text), rewards_of(client)


def rewards_of(client: SyncPenstockClient) -> list[float]:
    rewards = (step.metrics.get("reward_mean") for step in client.metrics(HISTORY, ["reward_mean"]))
    return [reward for reward in rewards if reward is not None]


def parse_series(text: str) -> dict[str, dict[str, float]]:
    """Metrics with at most one label, by name and then by the label's value ("" without a label)."""
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if len(sample.labels) <= 1:
                series.setdefault(sample.name, {})[next(iter(sample.labels.values()), "")] = sample.value
    return series


def _draw(run: Run, series: dict[str, dict[str, float]], history: Sequence[float]) -> Any:
    from rich.console import Group
    from rich.text import Text

    from penstock.diagnosis.terminal import plain_table, run_parts, sparkline

    restarts = series.get("penstock_component_restarts_total", {})
    heartbeats = sorted(series.get("penstock_heartbeat_age_seconds", {}).items())
    rows = [(name, f"{age_s:.1f} s ago", f"{restarts.get(name, 0.0):.0f}") for name, age_s in heartbeats]
    components = plain_table(("component", "heartbeat", "restarts"), rows, title="components")
    ages, scores = series.get("penstock_queue_oldest_age_seconds", {}), series.get("penstock_eval_score", {})
    lines = ["  ".join(f"oldest of {queue} {age_s:.1f} s" for queue, age_s in ages.items())]
    lines += ["scores  " + "  ".join(f"{name} {score:.3f}" for name, score in scores.items())] if scores else []
    rewards = [Text(f"reward {sparkline(history, HISTORY)}", style="green")] if history else []
    return Group(*run_parts(run), components, *map(Text, lines), *rewards)
