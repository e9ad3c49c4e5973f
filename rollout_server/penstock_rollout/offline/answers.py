"""Where answers are kept while they are made, and the file they become.

Beside `answers.parquet` stands a folder `answers.parquet.parts`: the settings, and parts of finished rows in the order
of finishing. A part is written aside, flushed and renamed, so it is whole or not there, and a row is in one part at
most. When every row is there the parts become the file, in the order of the dataset, and the folder goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from penstock.errors import InvalidInput
from penstock.trajectory import Prompt
from penstock_rollout.offline.prompt_columns import prompt_columns

PART_ROWS = 64
PART_S = 5.0
"""A killed generation loses the rows that finished since its last part: no more than these."""
MERGE_ROWS = 256
SETTINGS_KEY = b"penstock.generate"

ANSWER = pa.schema(
    [
        ("row", pa.int64()),
        ("responses", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("log_probs", pa.list_(pa.list_(pa.float32()))),
        ("loss_masks", pa.list_(pa.list_(pa.uint8()))),
        ("finish_reasons", pa.list_(pa.string())),
        ("rewards", pa.list_(pa.float64())),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Answer:
    """All samples of one row of the dataset; lists have one entry a sample, and are empty where it failed."""

    row: int
    responses: list[str] = field(default_factory=list)
    token_ids: list[Any] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    loss_masks: list[Any] = field(default_factory=list)
    """1 where the model sampled the token, 0 where a tool or an interaction inserted it."""
    finish_reasons: list[str] = field(default_factory=list)
    rewards: list[float] | None = None
    """None where nothing was scored."""
    error: str | None = None


@dataclass
class Totals:
    """Over all rows that are written, by this process or an earlier one."""

    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0

    def add(self, table: Any) -> None:
        self.num_samples += _sum(pc.list_value_length(table["responses"]))
        self.num_tokens += _sum(pc.list_value_length(pc.list_flatten(table["token_ids"])))
        self.num_failed += pc.count(table["error"]).as_py()
        rewards = pc.list_flatten(table["rewards"])
        self.reward_sum += _sum(rewards)
        self.num_rewards += len(rewards)


class AnswerStore:
    """The answers of one output file. One process at a time; `with` holds the lock and writes what is left."""

    def __init__(self, output: Path, settings: dict[str, str]) -> None:
        self.output = output
        self.settings = settings
        self.folder = output.with_name(f"{output.name}.parts")
        self.rows: set[int] = set()
        """Rows that are in a part, or in the finished file."""
        self.totals = Totals()
        self.finished = False
        self._waiting: list[Answer] = []
        self._written_at = time.monotonic()
        self._num_parts = 0
        self._lock: int | None = None

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
            self._flush()
        finally:
            self._release()

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is durable within PART_S, or PART_ROWS further answers."""
        self._waiting.append(answer)
        self.rows.add(answer.row)
        if len(self._waiting) >= PART_ROWS or time.monotonic() - self._written_at > PART_S:
            self._flush()

    def finish(self, prompts: Sequence[Prompt]) -> None:
        """Turn the parts into the file. Every row must be there."""
        self._flush()
        prompt_table = pa.table(prompt_columns(prompts))
        metadata = {SETTINGS_KEY: json.dumps(self.settings)}
        schema = pa.schema([*ANSWER, *prompt_table.schema], metadata=metadata)
        places = {row: part for part in self._parts() for row in _rows(part)}
        partial = self.folder / "whole.partial"
        with parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for start in range(0, len(prompts), MERGE_ROWS):
                answers = _gather(places, range(start, min(start + MERGE_ROWS, len(prompts))))
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
            self.folder.rmdir()  # another process finished just now
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
            table = parquet.read_table(self.output, columns=ANSWER.names)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(str(self.output), "exists and holds something else; choose another --output") from error
        self._check_settings(json.loads((table.schema.metadata or {}).get(SETTINGS_KEY, b"{}")), self.output)
        self._found(table)
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
            self._found(parquet.read_table(part, schema=ANSWER))
            self._num_parts = int(part.stem.rpartition("-")[2]) + 1

    def _check_settings(self, found: dict[str, str], where: Path) -> None:
        for name, value in self.settings.items():
            if found.get(name) != value:
                raise InvalidInput(
                    str(where),
                    f"holds answers with {name} {found.get(name, 'unknown')!r}, not {value!r}; "
                    "remove it, or choose another --output",
                )

    def _found(self, table: Any) -> None:
        self.rows.update(table["row"].to_pylist())
        self.totals.add(table)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))

    def _flush(self) -> None:
        self._written_at = time.monotonic()
        if not self._waiting:
            return
        columns = [pa.array([getattr(a, f.name) for a in self._waiting], f.type) for f in ANSWER]
        table = pa.Table.from_arrays(columns, schema=ANSWER)
        partial = self.folder / "part.partial"
        parquet.write_table(table, partial, compression="zstd")
        _sync(partial)
        partial.replace(self.folder / f"part-{self._num_parts:06d}.parquet")
        self._num_parts += 1
        self._waiting = []
        self.totals.add(table)


def _rows(part: Path) -> list[int]:
    rows: list[int] = parquet.read_table(part, columns=["row"])["row"].to_pylist()
    return rows


def _gather(places: Mapping[int, Path], rows: range) -> Any:
    """These rows, in their order. Rows that are neighbours lie in few parts, so not much more than them is read."""
    parts = dict.fromkeys(places[row] for row in rows)
    wanted = (pc.field("row") >= rows.start) & (pc.field("row") < rows.stop)
    return pa.concat_tables(parquet.read_table(part, schema=ANSWER).filter(wanted) for part in parts).sort_by("row")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sum(array: Any) -> Any:
    return pc.sum(array).as_py() or 0
