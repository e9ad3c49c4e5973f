"""A Parquet file of recorded groups: `penstock queue export` writes it and `import` reads it.

One row per group, with types that any Parquet reader can show. Arrays are converted as whole columns, never token by
token. A file from elsewhere is read too if it has these columns and types; older recordings lack the fields in LATER.
This module imports pyarrow, which is slow, at its top: import it only where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from penstock.codec import check_group
from penstock.errors import InvalidInput, PoisonGroup
from penstock.sampling import DISTRIBUTION_FIELDS, SAMPLING_FIELDS, Sampling
from penstock.trajectory import Group, SamplingSegment, Trajectory, VersionSegment

# ── groups as Arrow columns, which have the names of their fields ──

_SAMPLING_TYPES = {"seed": pa.int64(), "stop": pa.list_(pa.string()), "ignore_eos": pa.bool_()} | {
    name: pa.float32() for name in ("temperature", "top_p", "min_p")
}
"""The types of sampling parameters that are not int32."""


def _sampling(names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, _SAMPLING_TYPES.get(name, pa.int32())) for name in names]


_RANGE = [("start", pa.int32()), ("end", pa.int32())]
SEGMENT = pa.struct([*_RANGE, ("policy_version", pa.int64())])
SAMPLING_SEGMENT = pa.struct([*_RANGE, *_sampling(DISTRIBUTION_FIELDS)])
TRAJECTORY = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("log_probs", pa.list_(pa.float32())),
        ("segments", pa.list_(SEGMENT)),
        ("reward", pa.float64()),
        ("finish_reason", pa.string()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("is_baseline", pa.bool_()),
        ("sampling_segments", pa.list_(SAMPLING_SEGMENT)),
        ("episode", pa.int32()),
    ]
)
LATER = ("top_k", "min_p", "ignore_eos", "stop", "sampling_segments", "episode")
"""Fields that older recordings do not have. They have their defaults there."""
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("prompt_id", pa.int64()),
        ("attempt", pa.int32()),
        ("server_id", pa.string()),
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("sampling", pa.struct(_sampling(SAMPLING_FIELDS))),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("trajectories", pa.list_(TRAJECTORY)),
        ("finished_at_ms", pa.int64()),
        ("prompt", pa.binary()),
    ],
    metadata={"penstock.recording": "4"},
)


@dataclass(frozen=True)
class RecordedGroup:
    group: Group
    prompt: bytes
    """The encoded prompt that the group answers; empty if the recorded run no longer had it."""


def to_record_batch(rows: Sequence[RecordedGroup]) -> Any:
    groups = [row.group for row in rows]
    columns = [
        _array(field.type, [row.prompt for row in rows] if field.name == "prompt" else _named(groups, field.name))
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _named(objects: Sequence[Any], name: str) -> list[Any]:
    return [getattr(each, name) for each in objects]


def _array(kind: Any, values: Sequence[Any]) -> Any:
    """An Arrow array of objects that have the fields of `kind`, of arrays, of mappings, or of plain values."""
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays(
            [_array(field.type, _named(values, field.name)) for field in kind], fields=list(kind)
        )
    if pa.types.is_map(kind):
        pairs = [pair for value in values for pair in value.items()]
        keys, items = ([pair[index] for pair in pairs] for index in (0, 1))
        return pa.MapArray.from_arrays(_offsets(values), pa.array(keys, kind.key_type), pa.array(items, kind.item_type))
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    if pa.types.is_struct(kind.value_type):
        inner = _array(kind.value_type, [each for value in values for each in value])
    elif pa.types.is_string(kind.value_type):
        inner = pa.array([each for value in values for each in value], kind.value_type)
    else:
        inner = pa.array(np.concatenate(values) if values else np.empty(0), kind.value_type)
    return pa.ListArray.from_arrays(_offsets(values), inner)


def _offsets(values: Sequence[Sequence[Any]]) -> Any:
    lengths = np.cumsum([len(value) for value in values], dtype=np.int64)
    return pa.array(np.concatenate(([0], lengths)).astype(np.int32), pa.int32())


def from_record_batch(batch: Any) -> list[RecordedGroup]:
    """The rows of a batch that has SCHEMA's columns, and nulls only as seeds."""
    columns = [_values(batch.column(name)) for name in SCHEMA.names]
    rows = []
    for values in zip(*columns, strict=True):
        fields = dict(zip(SCHEMA.names, values, strict=True))
        prompt = fields.pop("prompt")
        trajectories = tuple(_trajectory(**each) for each in fields.pop("trajectories"))
        group = Group(sampling=Sampling(**fields.pop("sampling")), trajectories=trajectories, **fields)
        rows.append(RecordedGroup(group, prompt))
    return rows


def _trajectory(segments: Any, sampling_segments: Any = (), **fields: Any) -> Trajectory:
    calls = tuple(SamplingSegment(**each) for each in sampling_segments)
    return Trajectory(segments=tuple(VersionSegment(**each) for each in segments), sampling_segments=calls, **fields)


def _values(array: Any) -> Sequence[Any]:
    """The Python values of an Arrow array: mappings for structs and maps, numpy arrays for lists of numbers, and
    tuples for lists of texts."""
    kind = array.type
    if pa.types.is_struct(kind):
        columns = {field.name: _values(array.field(index)) for index, field in enumerate(kind)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if pa.types.is_map(kind):
        return [dict(pairs) for pairs in array.to_pylist()]
    if not pa.types.is_list(kind):
        return cast(list[Any], array.to_pylist())
    if pa.types.is_string(kind.value_type):
        values: Sequence[Any] = tuple(array.values.to_pylist())
    elif pa.types.is_struct(kind.value_type):
        values = _values(array.values)
    else:
        values = array.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(array.offsets.to_pylist())]


def has_nulls(array: Any) -> bool:
    if array.null_count:
        return True
    if isinstance(array, pa.MapArray):
        return has_nulls(array.keys) or has_nulls(array.items)
    if isinstance(array, pa.ListArray):
        return has_nulls(array.values)
    if isinstance(array, pa.StructArray):
        return any(has_nulls(array.field(i)) for i in range(array.type.num_fields))
    return False


def _is_readable(found: Any, wanted: Any) -> bool:
    """Whether a column of this type has all the fields that are wanted, but for those in LATER."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return _is_readable(found.value_type, wanted.value_type)
    if not (pa.types.is_struct(found) and pa.types.is_struct(wanted)):
        return bool(found == wanted)
    of_found, of_wanted = ({field.name: field.type for field in kind} for kind in (found, wanted))
    return of_found.keys() <= of_wanted.keys() and all(
        _is_readable(of_found[name], kind) if name in of_found else name in LATER for name, kind in of_wanted.items()
    )


# ── the file ──

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
                raise InvalidInput(f"{self.path} row {number}", f"{error}; remove the row") from error
            for trajectory in row.group.trajectories:
                if trajectory.finish_reason not in _FINISH_REASONS:
                    raise InvalidInput(f"{self.path} row {number}", f"finish_reason is not one of {_FINISH_REASONS}")
        return rows

    def _check_sampling(self, column: Any, first_row: int) -> None:
        """Refuse a row without the parameters that its tokens were sampled with. Only the seed may be missing."""
        for index, field in enumerate(column.type):
            if field.name != "seed" and (column.null_count or has_nulls(column.field(index))):
                raise InvalidInput(
                    f"{self.path} column sampling.{field.name}",
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
            if not _is_readable(found.field(field.name).type, field.type):
                raise InvalidInput(
                    f"{self.path} column {field.name}", f"is {found.field(field.name).type}, not {field.type}; cast it"
                )

    def _unreadable(self, error: Exception) -> InvalidInput:
        reason = " ".join(str(error).split())
        return InvalidInput(str(self.path), f"cannot be read as Parquet ({reason}); export it again")
