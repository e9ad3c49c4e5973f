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
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.api.conversion import check_label, json_text
from penstock.config.dataset import ColumnsConfig, DatasetConfig, Files, listed_files
from penstock.config.service import GatewayLimits
from penstock.errors import ConfigError, InvalidInput, named, one_line
from penstock.feed.parquet_rows import Check, all_rows, limited_rows
from penstock.trajectory import MESSAGE_FIELDS, Prompt, Sampling
from penstock.user_code import load_callable


def matching_files(path: Path) -> list[Path]:
    """The file or folder of a path, or the files of a pattern by name. Raises ConfigError if there are none."""
    if path.exists():
        return [path]
    if not any(sign in str(path) for sign in "*?["):
        raise ConfigError(f"dataset {path} does not exist")
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise ConfigError(f"no file matches dataset {path}")
    return found


def read_rows(
    path: Path, columns: Sequence[str], *, check: Check, limits: GatewayLimits | None = None
) -> Iterator[tuple[str, Any]]:
    """The place, such as `data.parquet row 7`, and the content of each row of a Parquet or JSONL file or a folder that
    Hugging Face's `save_to_disk` wrote, in its order. Only these columns of a Parquet file are read. JSONL has none to
    check."""
    if path.is_dir():
        return _folder_rows(path, check)
    if not path.is_file():
        raise InvalidInput(str(path), "is not a file; check the path")
    if path.suffix not in (".parquet", ".jsonl", ".ndjson"):
        raise InvalidInput(
            str(path), "is neither .parquet nor .jsonl nor a dataset's folder; convert it to one of them"
        )
    return _parquet_rows(path, limits, columns, check) if path.suffix == ".parquet" else _jsonl_rows(path)


def _parquet_rows(
    path: Path, limits: GatewayLimits | None, columns: Sequence[str], check: Check
) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        rows = all_rows(path, columns, check) if limits is None else limited_rows(path, columns, check, limits)
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ValueError is also raised for text that is not UTF-8, and OverflowError for dates.
        raise InvalidInput(str(path), f"cannot be read as Parquet ({one_line(error)}); write it again") from error


def _folder_rows(path: Path, check: Check) -> Iterator[tuple[str, Any]]:
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
                check(stream.schema.names)
                for batch in stream:
                    for row in batch.to_pylist():
                        yield f"{path} row {number}", row
                        number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidInput(str(path), f"cannot be read as Arrow ({one_line(error)}); save it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty if the file does not exist."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(str(path), f"cannot be read ({one_line(error)}); save the dataset again") from error
    return content if isinstance(content, dict) else {}


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
        raise InvalidInput(str(path), f"cannot be read as UTF-8 text ({one_line(error)})") from error


MEDIA_COLUMNS = ("images", "videos", "image", "video", "audios")
_USUAL = DatasetConfig()
_USUAL_COLUMNS = _USUAL.columns.model_dump()
"""Columns with these names may be absent. Every row must have the columns to which the config gives other names."""
_SHAPE = 'a list like [{"role": "user", "content": "..."}]'


def read_prompts(
    path: Path | str, *, num_samples: int, sampling: Sampling, limits: GatewayLimits | None = None,
    config: DatasetConfig = _USUAL,
) -> Iterator[Prompt]:  # fmt: skip
    """The prompts of a file or dataset folder, as the iterator advances. Raises InvalidInput beyond the limits. The
    config names columns, and the data source of rows that have none."""
    for number, (where, row) in enumerate(_rows(Path(path), limits, config.columns)):
        if limits is not None and number >= limits.max_dataset_prompts:
            raise InvalidInput(str(path), f"has more than {limits.max_dataset_prompts} prompts; split it")
        yield make_prompt(where, row, num_samples, sampling, config)


def first_prompts(path: Path, config: DatasetConfig, num_rows: int) -> list[Prompt]:
    return list(islice(read_prompts(path, num_samples=1, sampling=Sampling(max_tokens=1), config=config), num_rows))


def _rows(path: Path, limits: GatewayLimits | None, columns: ColumnsConfig) -> Iterator[tuple[str, Any]]:
    def check(names: Sequence[str]) -> None:
        if columns.prompt not in names:
            raise InvalidInput(
                str(path),
                f"has no column `{columns.prompt}`, only {', '.join(names)}; name the one that holds {_SHAPE} or a "
                "text in dataset.columns.prompt",
            )

    return read_rows(path, (*columns.names, *MEDIA_COLUMNS), check=check, limits=limits)


def make_prompt(where: str, row: Any, num_samples: int, sampling: Sampling, config: DatasetConfig) -> Prompt:
    """The prompt of a row. Raises InvalidInput, which names the row as `where`, for anything that would be lost."""
    if not isinstance(row, dict):
        raise InvalidInput(where, "must be an object with at least `prompt`")
    columns = config.columns
    _check_named_columns(where, row, columns)
    if media := [name for name in MEDIA_COLUMNS if row.get(name)]:
        raise InvalidInput(f"{where}: {media[0]}", "images, videos and audio are not supported; remove such rows")
    extra_info = row_field(where, row, columns.extra_info, dict, {})
    ground_truth = nested_field(where, row, columns.ground_truth)
    json_text(ground_truth, f"{where}: {columns.ground_truth}")
    json_text(extra_info, f"{where}: {columns.extra_info}")
    messages, message_fields = read_messages(f"{where}: {columns.prompt}", row.get(columns.prompt))
    agent_name = row_field(where, row, columns.agent_name, str, "")
    data_source = row_field(where, row, columns.data_source, str, "") or config.data_source
    try:
        "".join((agent_name, data_source, *(text for message in messages for text in message))).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(where, f"holds text that UTF-8 cannot write ({error.reason}); write it again") from error
    check_label(data_source, f"{where}: {columns.data_source}")
    check_label(agent_name, f"{where}: {columns.agent_name}")
    return Prompt(
        messages=messages, message_fields=message_fields, sampling=sampling, num_samples=num_samples,
        agent_name=agent_name, data_source=data_source, ground_truth=ground_truth, extra_info=extra_info,
    )  # fmt: skip


def _check_named_columns(where: str, row: dict[str, Any], columns: ColumnsConfig) -> None:
    """Raise InvalidInput if the row lacks a column that the config names. It may be null."""
    for field_name, usual in _USUAL_COLUMNS.items():
        column = getattr(columns, field_name)
        if column != usual and column.partition(".")[0] not in row:
            raise InvalidInput(
                where, f"has no column `{column}`; correct dataset.columns.{field_name}, or give the row a null"
            )


def nested_field(where: str, row: dict[str, Any], column: str) -> Any:
    """The value of a column, or of a field of it: `reward_model.ground_truth`."""
    name, _, field_name = column.partition(".")
    return row_field(where, row, name, dict, {}).get(field_name) if field_name else row.get(name)


def read_messages(where: str, value: Any) -> tuple[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]]:
    """Role and content of each message, and the further fields of messages that have some, by number."""
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
        json_text(fields, place)
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


def _kind(value: Any) -> str:
    return "missing" if value is None else "empty" if value == [] else type(value).__name__


def read_files(
    files: Files, config: DatasetConfig, num_samples: int, sampling: Sampling
) -> list[tuple[float, list[Prompt]]]:
    """The weight and the prompts of each entry, or of all rows of `dataset.loader`, which have the weight 1."""
    if config.loader:
        rows = _loaded(files, config)
        return [(1.0, [make_prompt(where, row, num_samples, sampling, config) for where, row in rows])]
    found: list[tuple[float, list[Prompt]]] = []
    for entry in listed_files(files):
        found.append((entry.weight, []))
        for path in matching_files(entry.file):
            found[-1][1].extend(read_prompts(path, num_samples=num_samples, sampling=sampling, config=config))
    return found


def shown_files(files: Files) -> str:
    return ", ".join(str(entry.file) for entry in listed_files(files))


def _loaded(files: Files, config: DatasetConfig) -> Iterable[tuple[str, Any]]:
    """The rows of the user's loader, each with its place."""
    loader = load_callable(config.loader, "dataset.loader")
    paths = [str(path) for entry in listed_files(files) for path in matching_files(entry.file)]
    try:
        for number, row in enumerate(loader(files=paths, **config.loader_kwargs)):
            yield f"{config.loader} row {number}", row
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput("dataset.loader", f"{config.loader} failed: {named(error)}") from error
