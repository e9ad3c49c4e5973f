"""Keeps the answers of an offline generation on disk, so that an interrupted one can continue.

Finished rows are written to a folder beside the output, `answers.parquet.parts`, together with the settings they were
made with. Each part file holds some rows in the order in which they finished. A part is written under a temporary name,
flushed and renamed, so it is either whole or absent. No row is in two parts. Once all rows are there, `finish` merges
the parts into `answers.parquet` in the order of the dataset and removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from penstock.errors import InvalidInput
from penstock.trajectory import Prompt
from penstock_tools.offline.answer_rows import ROW_SCHEMA, AnswerRow, Totals, to_table
from penstock_tools.offline.prompt_columns import prompt_columns

PART_ROWS = 64
PART_S = 5.0
"""A part is due after this many rows or seconds. A kill loses the rows since the last part."""
MERGE_ROWS = 256
SETTINGS_KEY = b"penstock.generate"


class AnswerStore:
    """The answers of one output file. Use it as a context manager, which locks the file for one process and writes the
    remaining rows on exit.

    `add` only keeps a row in memory. The caller calls `write_part`, from any thread, when `is_part_due`.
    """

    def __init__(self, output: Path, settings: dict[str, str]) -> None:
        self.output = output
        self.settings = settings
        self.folder = output.with_name(f"{output.name}.parts")
        self.rows: set[int] = set()
        """Rows that are finished: added, in a part, or in the output file."""
        self.totals = Totals()
        self.finished = False
        """Whether the output file exists."""
        self._waiting: list[AnswerRow] = []
        self._written_at = time.monotonic()
        self._num_parts = 0
        self._lock: int | None = None
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self._open()
        except OSError as error:
            self._release()
            raise InvalidInput(
                str(self.output), f"cannot be written ({error.strerror}); choose another --output"
            ) from error
        except InvalidInput:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.write_part()
        finally:
            self._release()

    def add(self, row: AnswerRow) -> None:
        self._waiting.append(row)
        self.rows.add(row.row)

    @property
    def is_part_due(self) -> bool:
        """Whether enough rows or time passed since the last part. False while a part is being written."""
        is_enough = len(self._waiting) >= PART_ROWS or time.monotonic() - self._written_at > PART_S
        return is_enough and not self._writing.locked()

    def write_part(self) -> None:
        """Write the rows added so far to a new part. When this returns they survive a kill."""
        with self._writing:
            self._written_at = time.monotonic()
            rows = self._waiting[:]
            if not rows:
                return
            table = to_table(rows)
            partial = self.folder / "part.partial"
            parquet.write_table(table, partial, compression="zstd")
            _sync(partial)
            partial.replace(self.folder / f"part-{self._num_parts:06d}.parquet")
            self._num_parts += 1
            del self._waiting[: len(rows)]
            self.totals.add(table)

    def finish(self, prompts: Sequence[Prompt]) -> None:
        """Merge the parts into the output file. Every row must have been added."""
        self.write_part()
        prompt_table = pa.table(prompt_columns(prompts))
        metadata = {SETTINGS_KEY: json.dumps(self.settings)}
        schema = pa.schema([*ROW_SCHEMA, *prompt_table.schema], metadata=metadata)
        part_of_row = {row: part for part in self._parts() for row in _rows(part)}
        partial = self.folder / "whole.partial"
        with parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for start in range(0, len(prompts), MERGE_ROWS):
                answers = _gather(part_of_row, range(start, min(start + MERGE_ROWS, len(prompts))))
                questions = prompt_table.slice(start, MERGE_ROWS)
                writer.write_table(pa.table([*answers.columns, *questions.columns], schema=schema))
        _sync(partial)
        partial.replace(self.output)
        shutil.rmtree(self.folder)
        self.finished = True

    def _open(self) -> None:
        if self.output.is_dir() or self.output.suffix != ".parquet":
            raise InvalidInput(str(self.output), "is not the name of a Parquet file; end --output with .parquet")
        if not self.output.parent.is_dir():
            raise InvalidInput(str(self.output), f"there is no folder {self.output.parent}; create it")
        if not self.output.exists():
            self.folder.mkdir(exist_ok=True)
            self._take_lock()
        if not self.output.exists():
            self._read_parts()
            return
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # another process finished between the two checks
        self._read_finished()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput(str(self.output), "is being written by another process; wait for it") from error

    def _read_finished(self) -> None:
        try:
            table = parquet.read_table(self.output, columns=ROW_SCHEMA.names)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                str(self.output), "exists and is not a file of answers; choose another --output"
            ) from error
        self._check_settings(json.loads((table.schema.metadata or {}).get(SETTINGS_KEY, b"{}")), self.output)
        self._count(table)
        self.finished = True

    def _read_parts(self) -> None:
        path = self.folder / "settings.json"
        if path.exists():
            self._check_settings(json.loads(path.read_text()), self.folder)
        else:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(self.settings, indent=1))
            _sync(partial)
            partial.replace(path)
        for part in self._parts():
            self._count(parquet.read_table(part, schema=ROW_SCHEMA))
            self._num_parts = int(part.stem.rpartition("-")[2]) + 1

    def _check_settings(self, found: dict[str, str], where: Path) -> None:
        for name, value in self.settings.items():
            if found.get(name) != value:
                raise InvalidInput(
                    str(where),
                    f"holds answers with {name} {found.get(name, 'unknown')!r}, not {value!r}; "
                    "remove it, or choose another --output",
                )

    def _count(self, table: Any) -> None:
        self.rows.update(table["row"].to_pylist())
        self.totals.add(table)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))


def _rows(part: Path) -> list[int]:
    rows: list[int] = parquet.read_table(part, columns=["row"])["row"].to_pylist()
    return rows


def _gather(part_of_row: Mapping[int, Path], rows: range) -> Any:
    """Read these rows in their order. Neighbouring rows finish close together, so they lie in few parts."""
    parts = dict.fromkeys(part_of_row[row] for row in rows)
    wanted = (pc.field("row") >= rows.start) & (pc.field("row") < rows.stop)
    tables = (parquet.read_table(part, schema=ROW_SCHEMA).filter(wanted) for part in parts)
    return pa.concat_tables(tables).sort_by("row")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
