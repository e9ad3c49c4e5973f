"""Reads prompts from dataset files: verl's Parquet schema, or the same fields in JSONL or a Hugging Face dataset on
disk.

    prompt         list of messages {role, content, ...}, or a text, which becomes one user message
    data_source    chooses the reward function
    reward_model   {ground_truth: anything JSON can carry, ...}
    extra_info     object handed to the reward function unchanged (optional)
    agent_name     name of the agent loop (optional)

`dataset.columns` gives them other names. Other columns are ignored, except images and videos, which are refused. A
wrong row raises InvalidInput with the file, the row or line, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.dataset import ColumnsConfig
from penstock.errors import InvalidInput
from penstock.feed.dataset_rows import read_rows
from penstock.feed.parquet_rows import ReadLimits
from penstock.trajectory import MESSAGE_FIELDS, Prompt, Sampling

MEDIA_COLUMNS = ("images", "videos", "image", "video", "audios")
_USUAL_COLUMNS = ColumnsConfig().model_dump()
"""Every row must have the columns that the config calls otherwise. Those with these names may be absent."""
_SHAPE = 'a list like [{"role": "user", "content": "..."}]'


@dataclass(frozen=True)
class RowFormat:
    """How rows become prompts."""

    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    data_source: str = ""
    """Data source of rows that have none."""


def read_prompts(
    path: Path | str, *, num_samples: int, sampling: Sampling, limits: ReadLimits | None = None,
    row_format: RowFormat | None = None,
) -> Iterator[Prompt]:  # fmt: skip
    """The prompts of a file, or of a folder that `Dataset.save_to_disk` wrote, in the order of its rows.

    Rows are read as the iterator advances. Raises InvalidInput for a file that is beyond the limits."""
    used = row_format or RowFormat()
    for number, (where, row) in enumerate(_rows(Path(path), limits, used.columns)):
        if limits is not None and number >= limits.max_rows:
            raise InvalidInput(str(path), f"has more than {limits.max_rows} prompts; split it")
        yield make_prompt(where, row, num_samples, sampling, used)


def _rows(path: Path, limits: ReadLimits | None, columns: ColumnsConfig) -> Iterator[tuple[str, Any]]:
    check = partial(_check_columns, path, columns=columns)
    return read_rows(path, (*columns.names, *MEDIA_COLUMNS), check=check, limits=limits)


def _check_columns(path: Path, names: Sequence[str], columns: ColumnsConfig) -> None:
    if columns.prompt not in names:
        raise InvalidInput(
            str(path),
            f"has no column `{columns.prompt}`, only {', '.join(names)}; name the one that holds {_SHAPE} or a text in "
            "dataset.columns.prompt",
        )


def make_prompt(where: str, row: Any, num_samples: int, sampling: Sampling, row_format: RowFormat) -> Prompt:
    """The prompt of a row. Raises InvalidInput, which names the row as `where`, for anything that would be lost."""
    if not isinstance(row, dict):
        raise InvalidInput(where, "must be an object with at least `prompt`")
    columns = row_format.columns
    _check_named_columns(where, row, columns)
    if media := [name for name in MEDIA_COLUMNS if row.get(name)]:
        raise InvalidInput(f"{where}: {media[0]}", "images, videos and audio are not supported; leave such rows out")
    extra_info = row_field(where, row, columns.extra_info, dict, {})
    ground_truth = _nested(where, row, columns.ground_truth)
    _check_json(f"{where}: {columns.ground_truth}", ground_truth)
    _check_json(f"{where}: {columns.extra_info}", extra_info)
    messages, message_fields = read_messages(f"{where}: {columns.prompt}", row.get(columns.prompt))
    agent_name = row_field(where, row, columns.agent_name, str, "")
    data_source = row_field(where, row, columns.data_source, str, "")
    _check_text(where, agent_name, data_source, *(text for message in messages for text in message))
    return Prompt(
        messages=messages,
        message_fields=message_fields,
        sampling=sampling,
        num_samples=num_samples,
        agent_name=agent_name,
        data_source=data_source or row_format.data_source,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def _check_named_columns(where: str, row: dict[str, Any], columns: ColumnsConfig) -> None:
    """Raise InvalidInput if the row lacks a column that the config names. It may be null."""
    for field_name, usual in _USUAL_COLUMNS.items():
        column = getattr(columns, field_name)
        if column != usual and column.partition(".")[0] not in row:
            raise InvalidInput(
                where, f"has no column `{column}`; correct dataset.columns.{field_name}, or give the row a null"
            )


def _nested(where: str, row: dict[str, Any], column: str) -> Any:
    """The value of a column, or of a field of it: `reward_model.ground_truth`."""
    name, _, field_name = column.partition(".")
    return row_field(where, row, name, dict, {}).get(field_name) if field_name else row.get(name)


def read_messages(where: str, value: Any) -> tuple[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]]:
    """Role and content of each message, and the further fields of those that have some, by their number."""
    if isinstance(value, str):
        return (("user", value),), {}
    if not isinstance(value, list) or not value:
        raise InvalidInput(where, f"must be {_SHAPE}, not {_kind(value)}")
    messages, further = [], {}
    for index, message in enumerate(value):
        place = f"{where}[{index}]"
        fields = dict(message) if isinstance(message, dict) else {}
        role = fields.pop("role", None)
        # Parquet gives every message the fields of all others, as null.
        fields = {name: field for name, field in fields.items() if field is not None}
        content = _content(place, fields.pop("content", "" if "tool_calls" in fields else None))
        if not isinstance(role, str) or not role or not isinstance(content, str):
            raise InvalidInput(place, "must have a `role` and a `content`, both text")
        if unknown := sorted(fields.keys() - MESSAGE_FIELDS):
            raise InvalidInput(place, f"has the field {unknown[0]}, which is not one of {', '.join(MESSAGE_FIELDS)}")
        _check_json(place, fields)
        messages.append((role, content))
        if fields:
            further[index] = fields
    return tuple(messages), further


def _content(where: str, content: Any) -> Any:
    """The content as text. Parts of text are joined; other parts are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidInput(where, f"has content of type {kind}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def row_field(where: str, row: dict[str, Any], name: str, kind: type, absent: Any) -> Any:
    """The field of a row, or `absent` if it is missing or null: Parquet does not distinguish the two."""
    value = row.get(name)
    if value is None:
        return absent
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "text"
        raise InvalidInput(f"{where}: {name}", f"must be {expected}, not {_kind(value)}")
    return value


def _check_text(where: str, *texts: str) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(where, f"holds text that UTF-8 cannot write ({error.reason}); write it again") from error


def _check_json(where: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            where, f"cannot be written as JSON ({error}); use text, numbers, lists and objects"
        ) from error


def _kind(value: Any) -> str:
    return "missing" if value is None else "empty" if value == [] else type(value).__name__
