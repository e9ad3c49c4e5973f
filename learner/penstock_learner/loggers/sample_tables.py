"""Samples as a table, for loggers that show tables or text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.samples.sample import Sample

COLUMNS = (
    "step", "prompt_id", "sample", "data_source", "reward", "reward_parts", "prompt", "response", "ground_truth",
    "num_tokens", "min_version", "max_version", "finish_reason", "server_id",
)  # fmt: skip
MAX_TEXT = 4000
"""Characters of a text that a table has. `samples.jsonl` has the whole text."""


def table_rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """One row per sample, with the values of COLUMNS. Nested values become JSON."""
    return [
        [_text(sample.ground_truth) if name == "ground_truth" else _cell(getattr(sample, name)) for name in COLUMNS]
        for sample in samples
    ]


def markdown(samples: Sequence[Sample]) -> str:
    """A section per sample. Texts are indented, so that nothing in them is read as Markdown."""
    return "\n\n".join(_section(sample) for sample in samples)


def _section(sample: Sample) -> str:
    parts = "".join(f" · {name} {value:g}" for name, value in sample.reward_parts.items() if value is not None)
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    head = f"**reward {reward}**{parts} · prompt {sample.prompt_id}.{sample.sample} · {sample.num_tokens} tokens"
    texts = {"prompt": sample.prompt, "ground truth": sample.ground_truth, "response": sample.response}
    blocks = [f"{name}:\n\n{_indented(_text(value))}" for name, value in texts.items()]
    return "\n\n".join([head, *blocks])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: Any) -> Any:
    """Numbers stay numbers. Everything else becomes text, because a column of a table may have one type only."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def _text(value: Any) -> str:
    return "" if value is None else str(_cell(value))
