"""`penstock status`: show the state of a run once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json

if TYPE_CHECKING:
    from penstock.client.responses import Metrics, QueueStat, Run, Server

DEADLINE_S = 5.0
_STEP_METRICS = {
    "reward_mean": "reward", "staleness_mean": "staleness", "tokens_per_second": "tokens/s", "loss": "loss",
    "entropy": "entropy", "kl_reference": "KL", "grad_norm": "grad norm", "logprob_mismatch": "mismatch",
}  # fmt: skip
_DIGEST_LENGTH = 8


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock status", description="Show the state of a run: step, version, queue, servers."
    )
    add_gateway_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with open_client(args, DEADLINE_S) as client:
        run = client.get_run()
    if args.json:
        print(to_json(run))
    else:
        _print(run)
    return 0


def _print(run: Run) -> None:
    from rich.console import Console

    console = Console()
    error = run.queue.conservation_error
    conserved = "conservation ok" if error == 0 else f"[bold red]conservation off by {error}[/]"
    console.print(
        f"run [bold]{run.run}[/]  step [bold]{run.step}[/]  policy version [bold]{run.policy_version}[/]  "
        f"term {run.term}  {conserved}"
    )
    console.print(step_numbers(run.metrics))
    console.print(queue_table(run.queue))
    if run.servers:
        console.print(server_table(run.servers))
    else:
        console.print("no rollout servers")
    for line in (*paused_servers(run.servers), *quarantined_servers(run.servers)):
        console.print(line)


def paused_servers(servers: Sequence[Server]) -> list[Any]:
    """A line for each server whose breaker is open."""
    from rich.text import Text

    return [
        Text(
            f"{server.server_id} leases nothing: its last {server.breaker_failures} attempts failed, the newest with "
            f"{server.breaker_reason}; see docs/runbooks.md#leasingpaused",
            style="bold red",
        )
        for server in servers
        if server.breaker_reason
    ]


def quarantined_servers(servers: Sequence[Server]) -> list[Any]:
    """A line for each server in quarantine."""
    from rich.text import Text

    return [
        Text(
            f"{server.server_id} is in quarantine: its log-probs differ by {server.logprob_mismatch_nats:.3g} nats a "
            f"token, more than {server.logprob_limit_nats:.3g}; weights loaded again {server.num_reloads} times; see "
            "docs/runbooks.md#serverquarantined",
            style="bold red",
        )
        for server in servers
        if server.is_quarantined
    ]


def step_numbers(metrics: Metrics) -> Any:
    """Key metrics of the step that made the newest version. `--json` shows all metrics."""
    from rich.text import Text

    shown = [(label, metrics[name]) for name, label in _STEP_METRICS.items() if metrics.get(name) is not None]
    return Text("  ".join(f"{label} {value:.4g}" for label, value in shown) or "no step yet")


def queue_table(queue: QueueStat) -> Any:
    """The groups of the queue by state, under the names of QueueStat; `ready` is `queued` without `delivered`. A group
    that the learner took counts as trained when a checkpoint covers it."""
    from rich.table import Table

    table = Table(title=f"groups, {queue.queued_bytes / 2**20:.1f} MiB of them ready", title_justify="left")
    columns = {
        "pending prompts": queue.pending_prompts,
        "in flight": queue.in_flight,
        "ready": queue.queued - queue.delivered,
        "delivered": queue.delivered,
        "trained": queue.trained,
        "expired": queue.expired,
        "dead-lettered": queue.dead_lettered,
        "reclaimed": queue.reclaimed,
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in columns.values()))
    return table


def server_table(servers: Sequence[Server]) -> Any:
    from rich.table import Table

    table = Table(title="rollout servers", title_justify="left")
    for name in ("server", "state", "version", "digest", "groups", "heartbeat", "engine", "address"):
        table.add_column(name, overflow="fold", no_wrap=name == "heartbeat")
    for server in servers:
        state = f"{server.state}, quarantined" if server.is_quarantined else server.state
        table.add_row(
            server.server_id, state if state == "READY" else f"[yellow]{state}[/]", str(server.policy_version),
            server.weights_digest[:_DIGEST_LENGTH] or "model folder", str(server.running_groups),
            f"{server.heartbeat_age_ms / 1000:.1f} s", server.engine, server.address,
        )  # fmt: skip
    return table
