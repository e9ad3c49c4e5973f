"""Reads the rows of one dataset file: Parquet, JSONL, or a folder that Hugging Face's `save_to_disk` wrote.

Each row comes with its place, such as `data.parquet row 7`, for error messages. What a row means is for the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput
from penstock.feed.parquet_rows import ReadLimits, all_rows, column_names, limited_rows

Check = Callable[[Sequence[str]], None]
"""Raises InvalidInput if a file with these columns cannot be used. JSONL has no columns, so it is not called for it."""


def read_rows(
    path: Path, columns: Sequence[str], *, check: Check, limits: ReadLimits | None = None
) -> Iterator[tuple[str, Any]]:
    """The place and the content of each row, in the file's order. Of a Parquet file, only these columns are read."""
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
    path: Path, limits: ReadLimits | None, columns: Sequence[str], check: Check
) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        names = column_names(path)
        check(names)
        wanted = [name for name in columns if name in names]
        rows = all_rows(path, wanted) if limits is None else limited_rows(path, wanted, limits)
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ValueError is also raised for text that is not UTF-8, and OverflowError for dates.
        raise InvalidInput(str(path), f"cannot be read as Parquet ({_one_line(error)}); write it again") from error


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
