"""`penstock status`: show the state of a run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json
from penstock.cli.parser import Parser

if TYPE_CHECKING:
    from penstock.api.records import Metrics, Notice, Run, Server

DEADLINE_S = 5.0
_STEP_METRICS = {
    "reward_mean": "reward", "staleness_mean": "staleness", "tokens_per_second": "tokens/s", "loss": "loss",
    "entropy": "entropy", "kl_reference": "KL", "grad_norm": "grad norm", "logprob_mismatch": "mismatch",
}  # fmt: skip
_DIGEST_LENGTH = 8
COLUMNS = 80


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="penstock status", description="Show the state of a run: step, version, queue, servers.")
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
    console.print(headline(run))
    for line in alarms(run):
        console.print(line)
    console.print(step_numbers(run.metrics))
    for line in verdicts(run):
        console.print(line)
    console.print(queue_numbers(run))
    if run.servers:
        console.print(server_table(run.servers))
    else:
        console.print("no rollout servers")


def headline(run: Run) -> Any:
    """State, step and version of a run."""
    from rich.text import Text

    head = Text.assemble(
        ("run ", "dim"), (run.run, "bold"), ("  state ", "dim"), (run.state.lower(), "bold"), ("  step ", "dim"),
        (str(run.step), "bold"), ("  version ", "dim"), (str(run.policy_version), "bold"),
        ("  term ", "dim"), str(run.term),
    )  # fmt: skip
    if run.queue.conservation_error:
        head.append(f"  conservation off by {run.queue.conservation_error}", "bold red")
    return head


def alarms(run: Run) -> list[Any]:
    """A line for everything that keeps the run from learning: its pause, what its processes do until they have started,
    servers that do not count, and notices."""
    from rich.text import Text

    state = [Text(f"{run.state.lower()}: {run.detail}", style="bold yellow")] if run.detail else []
    parts = run.parts if run.state in ("WAITING", "RUNNING") else ()
    starting = [Text(f"{part.component}: {part.phases[-1].name}") for part in parts if part.is_starting]
    failed = run.metrics.get("reward_failed_ratio") or 0.0
    share = [Text(f"the reward failed on {failed:.0%} of the samples of the newest step", style="bold red")]
    servers = [*paused_servers(run.servers), *quarantined_servers(run.servers)]
    notices = [Text(notice_text(notice), style="yellow") for notice in run.notices]
    return [*state, *_held(run), *starting, *(share if failed else []), *servers, *notices]


def _held(run: Run) -> list[Any]:
    from rich.text import Text

    return [Text(run.roll_back_text, style="bold yellow")] if run.roll_back_text else []


def notice_text(notice: Notice) -> str:
    return notice.text if notice.count == 1 else f"{notice.text} ({notice.count} times)"


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


def verdicts(run: Run) -> list[Any]:
    """Why the run does not learn, and why it is slow."""
    from rich.text import Text

    lines = (("learning  ", run.learning), ("speed     ", run.speed))
    return [Text.assemble((label, "dim"), text) for label, text in lines if text]


def step_numbers(metrics: Metrics) -> Any:
    """Key metrics of the step that made the newest version. `--json` shows all metrics."""
    from rich.text import Text

    shown = [(label, metrics[name]) for name, label in _STEP_METRICS.items() if metrics.get(name) is not None]
    return Text(_lines([f"{label} {value:.4g}" for label, value in shown]) or "no step yet")


def queue_numbers(run: Run) -> Any:
    """The groups of the queue by state. `training` are those that the learner took for a step that is not done."""
    from rich.text import Text

    queue = run.queue
    trained = queue.trained if run.num_trained is None else run.num_trained
    numbers = {
        "pending prompts": queue.pending_prompts,
        "in flight": queue.in_flight,
        f"ready ({queue.queued_bytes / 2**20:.1f} MiB)": queue.queued - queue.delivered,
        "training": queue.delivered + queue.trained - trained,
        "trained": trained,
        "expired": queue.expired,
        "dead-lettered": queue.dead_lettered,
        "reclaimed": queue.reclaimed,
    }
    lines = _lines(["groups", *(f"{name} {value}" for name, value in numbers.items())])
    return Text.assemble(("groups", "dim"), lines.removeprefix("groups"))


def _lines(items: Sequence[str]) -> str:
    """The items side by side, on lines of at most 80 columns that break between two items."""
    lines = [""]
    for item in items:
        longer = f"{lines[-1]}  {item}" if lines[-1] else item
        if len(longer) > COLUMNS:
            lines.append(item)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def server_table(servers: Sequence[Server]) -> Any:
    """A row per server, on 80 columns. `--json` has the addresses too."""
    from rich.table import Table

    table = Table(title="rollout servers", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("server", "state", "version", "digest", "groups", "heartbeat", "engine"):
        table.add_column(name, overflow="fold", no_wrap=name == "heartbeat")
    for server in servers:
        state = f"{server.state}, quarantined" if server.is_quarantined else server.state
        table.add_row(
            server.server_id, state if state == "READY" else f"[yellow]{state}[/]", str(server.policy_version),
            server.weights_digest[:_DIGEST_LENGTH] or "model folder", str(server.running_groups),
            f"{server.heartbeat_age_ms / 1000:.1f} s", server.engine,
        )  # fmt: skip
    return table
