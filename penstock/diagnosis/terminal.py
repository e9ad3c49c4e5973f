"""The parts of a run on a terminal, for `penstock status`, `top`, `servers` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.api.records import Finding, Metrics, Run, Server
from penstock.diagnosis import failed_rewards_finding, paused_finding, quarantine_finding

COLUMNS = 80
_BARS = "▁▂▃▄▅▆▇█"
_DIGEST_LENGTH = 8
_LEVEL_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}
_STEP_METRICS = {
    "reward_mean": "reward", "staleness_mean": "staleness", "tokens_per_second": "tokens/s", "loss": "loss",
    "entropy": "entropy", "kl_reference": "KL", "grad_norm": "grad norm", "logprob_mismatch": "mismatch",
}  # fmt: skip
STATUS_COLUMNS = ("server", "state", "version", "digest", "groups", "heartbeat", "engine")
"""Columns of the servers that fit on 80 characters."""
ADDRESS_COLUMNS = ("server", "state", "version", "groups", "engine", "address")


def run_parts(run: Run) -> list[RenderableType]:
    learning = (("learning  ", run.learning), ("speed     ", run.speed))
    findings = [Text.assemble((label, "dim"), text) for label, text in learning if text]
    table = server_table(run.servers, STATUS_COLUMNS, "rollout servers") if run.servers else Text("no rollout servers")
    return [_headline(run), *alarms(run), step_numbers(run.metrics), *findings, queue_numbers(run), table]


def _headline(run: Run) -> Text:
    head = Text.assemble(
        ("run ", "dim"), (run.run, "bold"), ("  state ", "dim"), (run.state.lower(), "bold"), ("  step ", "dim"),
        (str(run.step), "bold"), ("  version ", "dim"), (str(run.policy_version), "bold"),
        ("  term ", "dim"), str(run.term),
    )  # fmt: skip
    if run.queue.conservation_error:
        head.append(f"  conservation off by {run.queue.conservation_error}", "bold red")
    return head


def alarms(run: Run) -> list[Text]:
    """A line for all that keeps the run from learning: its pause, its start, servers that do not count, notices."""
    lines = [Text(f"{run.state.lower()}: {run.detail}", style="bold yellow")] if run.detail else []
    if run.rewind_text:
        lines.append(Text(run.rewind_text, style="bold yellow"))
    parts = run.parts if run.state in ("WAITING", "RUNNING") else ()
    lines += [Text(f"{part.component}: {part.phases[-1].name}") for part in parts if part.is_starting]
    if failed := run.metrics.get("reward_failed_ratio"):
        lines.append(Text(failed_rewards_finding(failed).line, style="bold red"))
    lines += server_alarms(run.servers)
    for notice in run.notices:
        times = "" if notice.count == 1 else f" ({notice.count} times)"
        lines.append(Text(notice.text + times, style="yellow"))
    return lines


def server_alarms(servers: Sequence[Server]) -> list[Text]:
    """A line for each server whose breaker is open, and then for each in quarantine."""
    paused = [paused_finding(s.server_id, s.breaker_failures, s.breaker_reason) for s in servers if s.breaker_reason]
    quarantined = [
        quarantine_finding(s.server_id, s.logprob_mismatch_nats, s.logprob_limit_nats, s.num_reloads)
        for s in servers
        if s.is_quarantined
    ]
    return [Text(found.line, style="bold red") for found in (*paused, *quarantined)]


def step_numbers(metrics: Metrics) -> Text:
    """Key metrics of the step that made the newest version. `--json` shows all metrics."""
    shown = [(label, metrics[name]) for name, label in _STEP_METRICS.items() if metrics.get(name) is not None]
    return Text(_lines([f"{label} {value:.4g}" for label, value in shown]) or "no step yet")


def queue_numbers(run: Run) -> Text:
    """The groups of the queue by state. `training` are groups that the learner took for a step that is not done."""
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


def server_table(servers: Sequence[Server], columns: Sequence[str], title: str | None = None) -> Table:
    """A row per server. `--json` has everything."""
    rows = []
    for server in servers:
        marks = {"drained": server.is_drained, "quarantined": server.is_quarantined}
        state = ", ".join([server.state, *(mark for mark, is_set in marks.items() if is_set)])
        cells = {
            "server": server.server_id,
            "state": Text(state, style="" if state == "READY" else "yellow"),
            "version": str(server.policy_version),
            "digest": server.weights_digest[:_DIGEST_LENGTH] or "model folder",
            "groups": str(server.running_groups),
            "heartbeat": f"{server.heartbeat_age_ms / 1000:.1f} s",
            "engine": server.engine,
            "address": server.address,
        }
        rows.append([cells[name] for name in columns])
    return plain_table(columns, rows, title=title)


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, whole: Sequence[str] = (), title: str | None = None
) -> Table:
    """A table without a frame. Columns of numbers are right-aligned, those in `whole` not wrapped; None is a dash."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        is_number = all(isinstance(row[index], int | float | None) for row in rows)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=name in whole or name == "heartbeat")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # no -0
    return "-" if value is None else str(value)


def sparkline(values: Sequence[float], width: int) -> str:
    """Bars, the newest on the right; more values than `width` are averaged. The scale includes 0 and 1."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min([0.0, *values]), max([1.0, *values])
    return "".join(_BARS[min(int((value - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for value in values)


def print_findings(findings: Iterable[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        advice = f": {finding.advice}" if finding.advice else ""
        level = (f"{finding.level.lower():<4}", _LEVEL_STYLES[finding.level])
        console.print(Text.assemble(level, f"  {finding.check:<12}  {finding.text}{advice}"))
