"""A group on the terminal: its prompt and its responses as text, or a table of its tokens."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal_text import labelled
from penstock.token_text import TokenText
from penstock.trajectory import Group, Prompt, Trajectory


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
