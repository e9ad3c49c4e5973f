"""`penstock top`: watch a run in the terminal. The numbers come from the gateway's API and its /metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.interruption import interruptible
from penstock.cli.parser import Parser
from penstock.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from penstock.api.records import Run
    from penstock.client import SyncPenstockClient

DEADLINE_S = 5.0
HISTORY = 60


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock top", description="Watch a run: steps, queue, servers and components. Press Ctrl-C to end."
    )
    add_gateway_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.run:
        raise InvalidInput(
            "--run",
            "`top` shows a gateway's own run only; use `penstock status --run`, or the URL of the run's own gateway",
        )
    from rich.console import Console
    from rich.live import Live

    with open_client(args, DEADLINE_S) as client:
        console = Console()
        if args.once:
            console.print(draw(look(client)))
            return 0
        screen = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext()
        with interruptible("after it watched the run"), screen as live:
            while True:
                if live is None:  # a file or a pipe, which has no screen to draw on
                    console.print(draw(look(client)))
                else:
                    live.update(draw(look(client)), refresh=True)
                time.sleep(max(args.interval, 0.1))


@dataclass(frozen=True)
class Look:
    """The state of a run at one moment."""

    run: Run
    """The run as the gateway's API describes it."""
    series: dict[str, dict[str, float]]
    """The gateway's metrics with at most one label, by name and then by the label's value ("" without a label)."""
    rewards: list[float]
    """Mean reward of the newest steps, oldest first."""

    def value(self, name: str, label: str = "") -> float:
        return self.series.get(name, {}).get(label, 0.0)


def look(client: SyncPenstockClient) -> Look:
    import httpx

    url = f"{client.address.url}/metrics"
    run = client.get_run()
    try:
        text = httpx.get(url, timeout=DEADLINE_S, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} does not answer ({error}); is it a gateway?") from error
    return Look(run, parse_series(text), rewards_of(client))


def rewards_of(client: SyncPenstockClient) -> list[float]:
    """Mean reward of the newest steps, oldest first."""
    rewards = (step.metrics.get("reward_mean") for step in client.metrics(HISTORY, ["reward_mean"]))
    return [reward for reward in rewards if reward is not None]


def parse_series(text: str) -> dict[str, dict[str, float]]:
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if len(sample.labels) <= 1:
                series.setdefault(sample.name, {})[next(iter(sample.labels.values()), "")] = sample.value
    return series


def draw(now: Look) -> Any:
    from rich.console import Group
    from rich.text import Text

    from penstock.cli.commands.status import alarms, headline, queue_numbers, server_table, step_numbers, verdicts
    from penstock.sparkline import sparkline

    run = now.run
    parts: list[Any] = [headline(run), *alarms(run), step_numbers(run.metrics), *verdicts(run), queue_numbers(run)]
    parts.append(server_table(run.servers) if run.servers else Text("no rollout servers"))
    parts += [_parts(now), _ages_and_scores(now)]
    if now.rewards:
        parts.append(Text(f"reward {sparkline(now.rewards, HISTORY)}", style="green"))
    return Group(*parts)


def _parts(now: Look) -> Any:
    """Heartbeats and restarts of the run's components."""
    from rich.table import Table

    table = Table(title="components", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("component", "heartbeat", "restarts"):
        table.add_column(name)
    for component, age_s in sorted(now.series.get("penstock_heartbeat_age_seconds", {}).items()):
        restarts = now.value("penstock_component_restarts_total", component)
        table.add_row(component, f"{age_s:.1f} s ago", f"{restarts:.0f}")
    return table


def _ages_and_scores(now: Look) -> Any:
    from rich.text import Text

    ages = now.series.get("penstock_queue_oldest_age_seconds", {})
    return Text(
        "  ".join(
            [f"oldest of {queue} {age_s:.1f} s" for queue, age_s in ages.items()]
            + [f"score of {name!r} {score:.3f}" for name, score in now.series.get("penstock_eval_score", {}).items()]
        )
    )
