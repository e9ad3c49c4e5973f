"""Reads prompts from dataset files: verl's Parquet schema, or the same fields in JSONL or a Hugging Face dataset on
disk.

    prompt         list of {role, content}, or a text, which becomes one user message
    data_source    chooses the reward function
    reward_model   {ground_truth: anything JSON can carry, ...}
    extra_info     object handed to the reward function unchanged (optional)
    agent_name     name of the agent loop (optional)

Other columns are ignored. A wrong row raises InvalidInput with the file, the row or line, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput
from penstock.feed.parquet_rows import ReadLimits, all_rows, column_names, limited_rows
from penstock.trajectory import Prompt, Sampling

_COLUMNS = ("prompt", "data_source", "reward_model", "extra_info", "agent_name")
_SHAPE = 'a list like [{"role": "user", "content": "..."}]'


def read_prompts(
    path: Path | str, *, num_samples: int, sampling: Sampling, limits: ReadLimits | None = None
) -> Iterator[Prompt]:
    """The prompts of a file, or of a folder that `Dataset.save_to_disk` wrote, in the order of its rows.

    Rows are read as the iterator advances. Raises InvalidInput for a file that is beyond the limits."""
    for number, (where, row) in enumerate(_rows(Path(path), limits)):
        if limits is not None and number >= limits.max_rows:
            raise InvalidInput(str(path), f"has more than {limits.max_rows} prompts; split it")
        yield _prompt(where, row, num_samples, sampling)


def _rows(path: Path, limits: ReadLimits | None) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        return _folder_rows(path)
    if path.suffix not in (".parquet", ".jsonl", ".ndjson"):
        raise InvalidInput(
            str(path), "is neither .parquet nor .jsonl nor a dataset's folder; convert it to one of them"
        )
    if not path.is_file():
        raise InvalidInput(str(path), "is not a file; check the path")
    return _parquet_rows(path, limits) if path.suffix == ".parquet" else _jsonl_rows(path)


def _parquet_rows(path: Path, limits: ReadLimits | None) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        names = column_names(path)
        _check_columns(path, names)
        columns = [name for name in _COLUMNS if name in names]
        rows = all_rows(path, columns) if limits is None else limited_rows(path, columns, limits)
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ValueError is also raised for text that is not UTF-8, and OverflowError for dates.
        raise InvalidInput(str(path), f"cannot be read as Parquet ({_one_line(error)}); write it again") from error


def _folder_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of the Arrow streams that state.json names, in its order."""
    import pyarrow

    splits = _read_json(path / "dataset_dict.json").get("splits", [])
    if len(splits) > 1:
        raise InvalidInput(str(path), f"has the splits {', '.join(splits)}; choose one, as in {path / splits[0]}")
    if splits:
        path = path / splits[0]
    files = [path / entry["filename"] for entry in _read_json(path / "state.json").get("_data_files", [])]
    if not files:
        raise InvalidInput(str(path), "is not a dataset that save_to_disk wrote: its state.json names no files")
    number = 0
    try:
        for file in files:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                _check_columns(path, stream.schema.names)
                for batch in stream:
                    for row in batch.to_pylist():
                        yield f"{path} row {number}", row
                        number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidInput(str(path), f"cannot be read as Arrow ({_one_line(error)}); save it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty if the file does not exist."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(str(path), f"cannot be read ({_one_line(error)}); save the dataset again") from error
    return content if isinstance(content, dict) else {}


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if "prompt" not in names:
        raise InvalidInput(
            str(path), f"has no column `prompt`, only {', '.join(names)}; rename the one that holds {_SHAPE}"
        )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
                    raise InvalidInput(where, f"is not JSON ({error}); every line must be one object") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), f"cannot be read as UTF-8 text ({_one_line(error)})") from error


def _prompt(where: str, row: Any, num_samples: int, sampling: Sampling) -> Prompt:
    if not isinstance(row, dict):
        raise InvalidInput(where, "must be an object with at least `prompt`")
    reward_model = row_field(where, row, "reward_model", dict, {})
    extra_info = row_field(where, row, "extra_info", dict, {})
    ground_truth = reward_model.get("ground_truth")
    _check_json(f"{where}: reward_model.ground_truth", ground_truth)
    _check_json(f"{where}: extra_info", extra_info)
    messages = _messages(f"{where}: prompt", row.get("prompt"))
    agent_name = row_field(where, row, "agent_name", str, "")
    data_source = row_field(where, row, "data_source", str, "")
    _check_text(where, agent_name, data_source, *(text for message in messages for text in message))
    return Prompt(
        messages=messages,
        sampling=sampling,
        num_samples=num_samples,
        agent_name=agent_name or Prompt.agent_name,
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def _messages(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        return (("user", value),)
    if not isinstance(value, list) or not value:
        raise InvalidInput(where, f"must be {_SHAPE}, not {_kind(value)}")
    for index, message in enumerate(value):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not role or not isinstance(content, str):
            raise InvalidInput(f"{where}[{index}]", "must have a `role` and a `content`, both text")
    return tuple((message["role"], message["content"]) for message in value)


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
