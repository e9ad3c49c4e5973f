"""The output of `penstock queue`: tables for people, and records for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from penstock.cli.output import as_text, labelled, print_table, versions_text
from penstock.replay.inspection import DeadLetterContents, QueuedGroup, QueueReport, StoredDeadLetter
from penstock.samples import TokenText
from penstock.trajectory import Group, Prompt, Trajectory

_HEADLINE = ("step", "policy_version", "term")
_PLACES = ("pending_prompts", "in_flight", "queued", "delivered", "queued_bytes", "saved_bytes")
"""Fields of QueueStat that the table of places already shows."""


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
    """The fields of QueueStat; the fields of admission only if the run's limits are known."""
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

    places = [
        (place.name, place.count, None if place.num_bytes is None else place.num_bytes / 2**20,
         _age(place.oldest_age_s), place.note)
        for place in report.places
    ]  # fmt: skip
    print_table(("place", "count", "MiB", "oldest", "note" if any(place[-1] for place in places) else ""), places)
    counters = [
        ("trained, with a checkpoint" if name == "trained" else _words(name), None if value < 0 else value)
        for name, value in stat.items()
        if name not in _HEADLINE + _PLACES
    ]
    print_table(("counter", "count"), counters)
    for title, counted in (("dead-lettered for", report.dead_letter_reasons), ("expired for", report.expired_reasons)):
        if counted:
            print_table((title, "count"), sorted(counted.items(), key=lambda item: -item[1]))


# ── peek ──


def summary_record(queued: QueuedGroup) -> dict[str, Any]:
    if queued.group is None:
        return {"prompt_id": queued.prompt_id, "num_bytes": queued.num_bytes, "problem": queued.problem}
    names = ("attempt", "server_id", "min_version", "max_version", "num_response_tokens", "mean_reward")
    return {
        "prompt_id": queued.prompt_id,
        **{name: getattr(queued.group, name) for name in names},
        "num_samples": len(queued.group.trajectories),
        "num_bytes": queued.num_bytes,
    }


def print_groups(records: Sequence[dict[str, Any]]) -> None:
    """`records` are made by `summary_record`. The problem of a group that cannot be decoded stands for its server."""
    names = ("attempt", "server_id", "min_version", "max_version", "num_samples", "num_response_tokens", "mean_reward")
    shown = [{"server_id": group.get("problem")} | group for group in records]
    rows = [(group["prompt_id"], *map(group.get, names), group["num_bytes"]) for group in shown]
    columns = ("prompt", "attempt", "server", "oldest version", "newest", "samples", "tokens", "reward", "bytes")
    print_table(columns, rows, whole=("server",), empty="no group is ready")


def group_record(group: Group) -> dict[str, Any]:
    """The whole group, with one policy version for each token."""
    names = ("run", "prompt_id", "attempt", "server_id", "data_source", "agent_name", "finished_at_ms")
    of_sample = ("reward", "reward_parts", "finish_reason", "is_baseline")
    return {
        **{name: getattr(group, name) for name in names},
        "sampling": asdict(group.sampling),
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "trajectories": [
            {
                **{name: getattr(sample, name) for name in of_sample},
                "sampling_segments": [asdict(call) for call in sample.sampling_segments],
                **{name: getattr(sample, name).tolist() for name in ("token_ids", "loss_mask", "log_probs")},
                "policy_versions": sample.token_versions().tolist(),
            }
            for sample in group.trajectories
        ],
    }


# ── dead letters ──


def dead_letter_record(letter: StoredDeadLetter) -> dict[str, Any]:
    fields = asdict(letter)
    return {"id": fields.pop("stream_id"), "time_ms": letter.time_ms, **fields}


def print_dead_letters(records: Sequence[dict[str, Any]]) -> None:
    columns = ("id", "time (UTC)", "prompt", "reason")
    rows = [(each["id"], time_text(each["time_ms"]), each["prompt_id"], each["reason"]) for each in records]
    print_table(columns, rows, whole=columns[:2], empty="no dead letters")


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
        fields = asdict(contents.prompt)
        rows = [*fields.pop("messages"), *((_words(name), value) for name, value in fields.items())]
        shown = [(name, pairs(value) if isinstance(value, dict) else str(value)) for name, value in rows if value]
        print_table(("prompt", ""), shown)
    if contents.group is None:
        console.print(f"group: {escape(contents.group_problem)}")
    else:
        print_group(contents.group, contents.prompt, texts)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _age(age_s: float | None) -> str | None:
    if age_s is None:
        return None
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
            _print_tokens(trajectory, texts)
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
        asked["truth"] = as_text(prompt.ground_truth)
    return asked


def _title(index: int, trajectory: Trajectory) -> str:
    parts = f"  ({pairs(trajectory.reward_parts)})" if trajectory.reward_parts else ""
    versions = versions_text(trajectory.min_version, trajectory.max_version)
    baseline = "  baseline" if trajectory.is_baseline else ""
    return (
        f"sample {index}  reward {trajectory.reward:.4f}{parts}  {len(trajectory.token_ids)} tokens  {versions}  "
        f"{trajectory.finish_reason}{baseline}"
    )


def _print_tokens(trajectory: Trajectory, texts: TokenText) -> None:
    ids = trajectory.token_ids.tolist()
    rows = zip(
        range(len(ids)), ids, trajectory.log_probs.tolist(), trajectory.token_versions().tolist(),
        ("yes" if mask else "no" for mask in trajectory.loss_mask),
        (repr(text)[1:-1] for text in (texts.tokens(ids) if texts.is_known else [""] * len(ids))), strict=True,
    )  # fmt: skip
    print_table(("position", "token", "log-prob", "version", "trained", "text"), rows)


def pairs(values: dict[str, Any]) -> str:
    return "  ".join(f"{_words(name)} {value}" for name, value in values.items())


def time_text(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
