"""The output of `penstock queue`: tables for people, and records for `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.output import labelled
from penstock.replay.inspection import DeadLetter, DeadLetterContents, QueuedGroup, QueueReport
from penstock.samples import TokenText
from penstock.trajectory import Group, Prompt, Trajectory

_HEADLINE = ("step", "policy_version", "term")
_PLACES = ("pending_prompts", "in_flight", "queued", "delivered", "queued_bytes", "saved_bytes")
"""Fields of QueueStat that the table of places already shows."""

_COUNTERS = {"trained": "trained, with a checkpoint"}
"""Names of counters that need more words than their field has."""


# ── stat ──


def report_record(report: QueueReport) -> dict[str, Any]:
    return {
        "run": report.run,
        **_stat(report),
        "conservation_error": report.stat.conservation_error,
        "places": [asdict(place) for place in report.places],
        "dead_letter_reasons": report.dead_letter_reasons,
        "expired_reasons": report.expired_reasons,
    }


def _stat(report: QueueReport) -> dict[str, int]:
    """The fields of QueueStat; those of admission only if the run's limits are known."""
    return {
        name: value
        for name, value in asdict(report.stat).items()
        if report.limits_known or not name.startswith("admission_")
    }


def print_report(report: QueueReport) -> None:
    console = Console()
    stat = _stat(report)
    error = report.stat.conservation_error
    conserved = "conservation ok" if error == 0 else f"[bold red]conservation off by {error}[/]"
    headline = "  ".join(f"{_words(name)} [bold]{stat[name]}[/]" for name in _HEADLINE)
    console.print(f"run [bold]{report.run}[/]  {headline}  {conserved}")

    notes = ["note"] if any(place.note for place in report.places) else []
    places = _table("place", ("count", "MiB", "oldest"), *notes)
    for place in report.places:
        cells = (place.name, _int(place.count), _mib(place.num_bytes), _age(place.oldest_age_s), place.note)
        places.add_row(*cells[: 4 + len(notes)])
    console.print(places)

    counts = _table("counter", ("count",))
    for name, value in stat.items():
        if name not in _HEADLINE + _PLACES:
            counts.add_row(_COUNTERS.get(name, _words(name)), "-" if value < 0 else _int(value))
    console.print(counts)

    for title, counted in (("dead-lettered for", report.dead_letter_reasons), ("expired for", report.expired_reasons)):
        if counted:
            reasons = _table(title, ("count",))
            for reason, count in sorted(counted.items(), key=lambda item: -item[1]):
                reasons.add_row(escape(reason), _int(count))
            console.print(reasons)


# ── peek ──


def summary_record(queued: QueuedGroup) -> dict[str, Any]:
    if queued.group is None:
        return {"prompt_id": queued.prompt_id, "num_bytes": queued.num_bytes, "problem": queued.problem}
    group = queued.group
    return {
        "prompt_id": queued.prompt_id,
        "attempt": group.attempt,
        "server_id": group.server_id,
        "min_version": group.min_version,
        "max_version": group.max_version,
        "num_samples": len(group.trajectories),
        "num_response_tokens": group.num_response_tokens,
        "mean_reward": group.mean_reward,
        "num_bytes": queued.num_bytes,
    }


def print_groups(groups: Sequence[QueuedGroup]) -> None:
    console = Console()
    if not groups:
        console.print("no group is ready")
        return
    table = Table()
    for name in ("prompt", "attempt"):
        table.add_column(name, justify="right")
    table.add_column("server", no_wrap=True)
    for name in ("versions", "samples", "tokens", "reward", "bytes"):
        table.add_column(name, justify="right")
    for queued in groups:
        group = queued.group
        if group is None:
            table.add_row(
                str(queued.prompt_id), "-", f"[red]{escape(queued.problem)}[/]", *"----", _int(queued.num_bytes)
            )
            continue
        table.add_row(
            str(queued.prompt_id), str(group.attempt), escape(group.server_id),
            f"{group.min_version}..{group.max_version}", str(len(group.trajectories)),
            _int(group.num_response_tokens), f"{group.mean_reward:.4f}", _int(queued.num_bytes),
        )  # fmt: skip
    console.print(table)


def group_record(group: Group) -> dict[str, Any]:
    """The whole group, with one policy version for each token."""
    return {
        "run": group.run,
        "prompt_id": group.prompt_id,
        "attempt": group.attempt,
        "server_id": group.server_id,
        "data_source": group.data_source,
        "agent_name": group.agent_name,
        "sampling": asdict(group.sampling),
        "finished_at_ms": group.finished_at_ms,
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "trajectories": [
            {
                "reward": trajectory.reward,
                "reward_parts": trajectory.reward_parts,
                "finish_reason": trajectory.finish_reason,
                "is_baseline": trajectory.is_baseline,
                "sampling_segments": [asdict(call) for call in trajectory.sampling_segments],
                "token_ids": trajectory.token_ids.tolist(),
                "loss_mask": trajectory.loss_mask.tolist(),
                "log_probs": trajectory.log_probs.tolist(),
                "policy_versions": trajectory.token_versions().tolist(),
            }
            for trajectory in group.trajectories
        ],
    }


# ── dead letters ──


def dead_letter_record(letter: DeadLetter) -> dict[str, Any]:
    fields = asdict(letter)
    return {"id": fields.pop("stream_id"), "time_ms": letter.time_ms, **fields}


def print_dead_letters(letters: Sequence[DeadLetter]) -> None:
    console = Console()
    if not letters:
        console.print("no dead letters")
        return
    table = Table()
    table.add_column("id", no_wrap=True)
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("prompt", justify="right")
    table.add_column("reason")
    for letter in letters:
        table.add_row(letter.stream_id, time_text(letter.time_ms), str(letter.prompt_id), escape(letter.reason))
    console.print(table)


def contents_record(contents: DeadLetterContents) -> dict[str, Any]:
    return {
        **dead_letter_record(contents.letter),
        "prompt": asdict(contents.prompt) if contents.prompt else None,
        "group": group_record(contents.group) if contents.group else None,
        "group_problem": contents.group_problem,
    }


def print_contents(contents: DeadLetterContents, texts: TokenText) -> None:
    console = Console()
    letter = contents.letter
    console.print(
        f"dead letter [bold]{letter.stream_id}[/]  {time_text(letter.time_ms)} UTC  prompt {letter.prompt_id}"
    )
    console.print(f"reason: {escape(letter.reason)}")
    if contents.prompt is None:
        console.print(f"prompt: {letter.prompt_bytes} bytes that cannot be decoded")
    else:
        _print_prompt(console, contents.prompt)
    if contents.group is None:
        console.print(f"group: {escape(contents.group_problem)}")
    else:
        print_group(contents.group, contents.prompt, texts)


def _print_prompt(console: Console, prompt: Prompt) -> None:
    table = Table("field", "value", title="prompt", title_justify="left")
    for role, content in prompt.messages:
        table.add_row(escape(role), escape(content))
    for name, value in asdict(prompt).items():
        if name != "messages" and value not in ((), {}, "", None):
            table.add_row(_words(name), escape(pairs(value) if isinstance(value, dict) else str(value)))
    console.print(table)


# ── cells ──


def _table(first: str, numbers: Iterable[str], *texts: str) -> Table:
    table = Table()
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    for name in texts:
        table.add_column(name)
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _int(value: int) -> str:
    return f"{value:,}"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "-"
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.1f} s"


def print_group(group: Group, prompt: Prompt | None, texts: TokenText, *, with_tokens: bool = False) -> None:
    """Print the whole group. Without a tokenizer, ids stand for text. `prompt` is None if it is not known."""
    console = Console()
    finished = time_text(group.finished_at_ms) if group.finished_at_ms else "unknown"
    console.print(
        f"prompt [bold]{group.prompt_id}[/]  attempt {group.attempt}  server {escape(group.server_id)}  "
        f"data source {escape(group.data_source) or '-'}  agent {escape(group.agent_name)}  finished {finished}"
    )
    console.print(pairs(asdict(group.sampling)), style="dim")
    console.print(labelled(_asked(group, prompt, texts)))
    for index, trajectory in enumerate(group.trajectories):
        console.print(Text(_title(index, trajectory), style="bold"))
        if with_tokens:
            console.print(_token_table(trajectory, texts))
        else:
            console.print(labelled({"response": texts.text(trajectory.token_ids.tolist(), special=True)}))


def _asked(group: Group, prompt: Prompt | None, texts: TokenText) -> dict[str, str]:
    """The prompt as it was submitted, or as the model saw it if its tokens are all that is known."""
    if prompt is None or not prompt.messages:
        asked = {"prompt": texts.text(group.prompt_token_ids.tolist(), special=True)}
    else:
        asked = dict(prompt.messages)
        if len(asked) < len(prompt.messages):
            asked = {"prompt": "\n".join(f"{role}: {content}" for role, content in prompt.messages)}
    if prompt is not None and prompt.ground_truth is not None:
        truth = prompt.ground_truth
        asked["truth"] = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    return asked


def _title(index: int, trajectory: Trajectory) -> str:
    parts = f"  ({pairs(trajectory.reward_parts)})" if trajectory.reward_parts else ""
    low, high = trajectory.min_version, trajectory.max_version
    versions = f"version {low}" if low == high else f"versions {low}-{high}"
    baseline = "  baseline" if trajectory.is_baseline else ""
    return (
        f"sample {index}  reward {trajectory.reward:.4f}{parts}  {len(trajectory.token_ids)} tokens  {versions}  "
        f"{trajectory.finish_reason}{baseline}"
    )


def _token_table(trajectory: Trajectory, texts: TokenText) -> Table:
    table = Table()
    for name in ("position", "token", "log-prob", "version"):
        table.add_column(name, justify="right")
    for name in ("trained", "text"):
        table.add_column(name)
    ids = trajectory.token_ids.tolist()
    rows = zip(
        ids, trajectory.log_probs.tolist(), trajectory.token_versions().tolist(), trajectory.loss_mask.tolist(),
        texts.tokens(ids) if texts.is_known else [""] * len(ids), strict=True,
    )  # fmt: skip
    for position, (token, log_prob, version, mask, text) in enumerate(rows):
        cells = (str(position), str(token), f"{log_prob:.4f}", str(version), "yes" if mask else "no")
        table.add_row(*cells, Text(repr(text)[1:-1]))
    return table


def pairs(values: dict[str, Any]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def time_text(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
