"""A Parquet file of recorded groups: `penstock queue export` writes it and `import` reads it.

A file from elsewhere is read too if it has the columns and types of penstock_tools.recordings.columns. This module
imports pyarrow, which is slow, at its top: import it only where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from pyarrow import parquet

from penstock.codec import check_group
from penstock.errors import InvalidInput, PoisonGroup
from penstock_tools.recordings.columns import (
    SCHEMA,
    TRAJECTORY_TYPES,
    RecordedGroup,
    from_record_batch,
    has_nulls,
    to_record_batch,
)

ROW_GROUP_ROWS = 512
ROW_GROUP_BYTES = 32 * 2**20
"""Upper bound on the bytes of arrays in a row group. An export or import needs a small multiple of it in memory."""

_FINISH_REASONS = ("stop", "length", "aborted")


class RecordingWriter:
    """Writes row groups as they fill. The complete file appears when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self._rows: list[RecordedGroup] = []
        self._num_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._file = self.partial.open("wb")
        except OSError as error:
            raise InvalidInput(str(self.path), f"cannot be written ({error.strerror}); choose another path") from error
        self._writer = parquet.ParquetWriter(self._file, SCHEMA, compression="zstd")
        return self

    def write(self, row: RecordedGroup) -> None:
        self._rows.append(row)
        self._num_bytes += len(row.prompt) + 9 * row.group.num_response_tokens + row.group.prompt_token_ids.nbytes
        if len(self._rows) >= ROW_GROUP_ROWS or self._num_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                os.fsync(self._file.fileno())
                self.partial.replace(self.path)
        except OSError as failure:
            raise InvalidInput(
                str(self.path), f"cannot be written ({failure}); free space or choose another path"
            ) from failure
        finally:
            self._file.close()
            self.partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_batch(to_record_batch(self._rows))
        self._rows, self._num_bytes = [], 0


class Recording:
    """A file of recorded groups. Rows are read in the file's order and checked as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise InvalidInput(str(self.path), "is not a file; `penstock queue export` writes one")
        try:
            # Pre-buffering would keep every row group in memory after it was read.
            self._file = parquet.ParquetFile(self.path, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        self.num_rows: int = self._file.metadata.num_rows
        try:
            self._check_columns()
        except InvalidInput:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, batch_rows: int) -> Iterator[list[RecordedGroup]]:
        """Every row, in batches of at most `batch_rows`."""
        row = 0
        try:
            for batch in self._file.iter_batches(batch_size=batch_rows, columns=SCHEMA.names):
                yield self._checked(batch, row)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _checked(self, batch: Any, first_row: int) -> list[RecordedGroup]:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name == "sampling":
                self._check_sampling(column, first_row)
            elif has_nulls(column):
                raise InvalidInput(f"{self.path} column {name}", f"has nulls in rows from {first_row}; fill them in")
        rows = from_record_batch(batch)
        for number, row in enumerate(rows, start=first_row):
            try:
                check_group(row.group)
            except PoisonGroup as error:
                raise InvalidInput(f"{self.path} row {number}", f"{error}; leave the row out") from error
            for trajectory in row.group.trajectories:
                if trajectory.finish_reason not in _FINISH_REASONS:
                    raise InvalidInput(f"{self.path} row {number}", f"finish_reason is not one of {_FINISH_REASONS}")
        return rows

    def _check_sampling(self, column: Any, first_row: int) -> None:
        """Refuse a row without the parameters that its tokens were sampled with. Only the seed may be missing."""
        for name in ("temperature", "top_p", "max_tokens"):
            if column.null_count or column.field(name).null_count:
                raise InvalidInput(
                    f"{self.path} column sampling.{name}",
                    f"has nulls in rows from {first_row}; fill in what the tokens were sampled with: the learner "
                    "computes their log-probs with it",
                )

    def _check_columns(self) -> None:
        found = self._file.schema_arrow
        for field in SCHEMA:
            if field.name not in found.names:
                raise InvalidInput(
                    str(self.path), f"has no column `{field.name}`; `penstock queue export` writes what this reads"
                )
            types = TRAJECTORY_TYPES if field.name == "trajectories" else (field.type,)
            if found.field(field.name).type not in types:
                raise InvalidInput(
                    f"{self.path} column {field.name}", f"is {found.field(field.name).type}, not {field.type}; cast it"
                )

    def _unreadable(self, error: Exception) -> InvalidInput:
        reason = " ".join(str(error).split())
        return InvalidInput(str(self.path), f"cannot be read as Parquet ({reason}); export it again")
