"""A Parquet file of recorded groups: `penstock queue export` writes it and `import` reads it.

One row per group, with types that any Parquet reader can show. Arrays are converted as whole columns, never token by
token. A file from elsewhere is read too if it has these columns and types. Recordings of version 1 have trajectories
without `sampling_segments`, those of version 2 without `episode`; they are read too. This module imports pyarrow, which
is slow, at its top: import it only where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from penstock.codec import check_group
from penstock.errors import InvalidInput, PoisonGroup
from penstock.trajectory import Group, Sampling, SamplingSegment, Trajectory, VersionSegment

# ── groups as Arrow columns ──

SEGMENT = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("policy_version", pa.int64())])
SAMPLING = pa.struct(
    [("temperature", pa.float32()), ("top_p", pa.float32()), ("max_tokens", pa.int32()), ("seed", pa.int64())]
)
SAMPLING_SEGMENT = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("temperature", pa.float32()), ("top_p", pa.float32())]
)
TRAJECTORY_1 = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("log_probs", pa.list_(pa.float32())),
        ("segments", pa.list_(SEGMENT)),
        ("reward", pa.float64()),
        ("finish_reason", pa.string()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("is_baseline", pa.bool_()),
    ]
)
"""A trajectory in a recording of version 1."""
TRAJECTORY_2 = pa.struct([*TRAJECTORY_1, pa.field("sampling_segments", pa.list_(SAMPLING_SEGMENT))])
TRAJECTORY = pa.struct([*TRAJECTORY_2, pa.field("episode", pa.int32())])
TRAJECTORY_TYPES = (pa.list_(TRAJECTORY_1), pa.list_(TRAJECTORY_2), pa.list_(TRAJECTORY))
"""Types of the column `trajectories` that can be read."""
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("prompt_id", pa.int64()),
        ("attempt", pa.int32()),
        ("server_id", pa.string()),
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("sampling", SAMPLING),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("trajectories", pa.list_(TRAJECTORY)),
        ("finished_at_ms", pa.int64()),
        ("prompt", pa.binary()),
    ],
    metadata={"penstock.recording": "3"},
)


@dataclass(frozen=True)
class RecordedGroup:
    group: Group
    prompt: bytes
    """The encoded prompt that the group answers; empty if the recorded run no longer had it."""


# ── groups to columns ──


def to_record_batch(rows: Sequence[RecordedGroup]) -> Any:
    groups = [row.group for row in rows]
    sampling = [group.sampling for group in groups]
    columns = {
        "sampling": _structs(
            SAMPLING,
            [s.temperature for s in sampling], [s.top_p for s in sampling], [s.max_tokens for s in sampling],
            [s.seed for s in sampling],
        ),
        "prompt_token_ids": _lists([group.prompt_token_ids for group in groups], pa.int32()),
        "trajectories": _nested(
            [len(group.trajectories) for group in groups], _trajectories([t for g in groups for t in g.trajectories])
        ),
        "prompt": pa.array([row.prompt for row in rows], pa.binary()),
    }  # fmt: skip
    plain = {
        field.name: pa.array([getattr(group, field.name) for group in groups], field.type)
        for field in SCHEMA
        if field.name not in columns
    }
    return pa.RecordBatch.from_arrays([(plain | columns)[name] for name in SCHEMA.names], schema=SCHEMA)


def _trajectories(trajectories: Sequence[Trajectory]) -> Any:
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    parts = [part for trajectory in trajectories for part in trajectory.reward_parts.items()]
    calls = [segment for trajectory in trajectories for segment in trajectory.sampling_segments]
    return _structs(
        TRAJECTORY,
        _lists([t.token_ids for t in trajectories], pa.int32()),
        _lists([t.loss_mask for t in trajectories], pa.uint8()),
        _lists([t.log_probs for t in trajectories], pa.float32()),
        _nested(
            [len(t.segments) for t in trajectories],
            _structs(
                SEGMENT, [s.start for s in segments], [s.end for s in segments], [s.policy_version for s in segments]
            ),
        ),
        [t.reward for t in trajectories],
        [t.finish_reason for t in trajectories],
        pa.MapArray.from_arrays(
            _offsets([len(t.reward_parts) for t in trajectories]),
            pa.array([name for name, _ in parts], pa.string()),
            pa.array([value for _, value in parts], pa.float64()),
        ),
        [t.is_baseline for t in trajectories],
        _nested(
            [len(t.sampling_segments) for t in trajectories],
            _structs(
                SAMPLING_SEGMENT, [s.start for s in calls], [s.end for s in calls], [s.temperature for s in calls],
                [s.top_p for s in calls],
            ),
        ),
        [t.episode for t in trajectories],
    )  # fmt: skip


def _structs(kind: Any, *children: Any) -> Any:
    arrays = [
        child if isinstance(child, pa.Array) else pa.array(child, kind.field(index).type)
        for index, child in enumerate(children)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _lists(arrays: Sequence[NDArray[Any]], element: Any) -> Any:
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return _nested([len(array) for array in arrays], pa.array(values, element))


def _nested(lengths: Sequence[int], values: Any) -> Any:
    return pa.ListArray.from_arrays(_offsets(lengths), values)


def _offsets(lengths: Sequence[int]) -> Any:
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32), pa.int32())


# ── columns to groups ──


def from_record_batch(batch: Any) -> list[RecordedGroup]:
    """The rows of a batch that has SCHEMA's columns, and nulls only as seeds."""
    plain = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name not in _ARRAY_COLUMNS}
    prompt_tokens = _split(batch.column("prompt_token_ids"))
    column = batch.column("trajectories")
    trajectories = _read_trajectories(column.values)
    rows = []
    for i, (start, end) in enumerate(pairwise(column.offsets.to_pylist())):
        group = Group(
            run=plain["run"][i],
            prompt_id=plain["prompt_id"][i],
            attempt=plain["attempt"][i],
            server_id=plain["server_id"][i],
            data_source=plain["data_source"][i],
            sampling=Sampling(**plain["sampling"][i]),
            prompt_token_ids=prompt_tokens[i],
            trajectories=tuple(trajectories[start:end]),
            agent_name=plain["agent_name"][i],
            finished_at_ms=plain["finished_at_ms"][i],
        )
        rows.append(RecordedGroup(group, plain["prompt"][i]))
    return rows


_ARRAY_COLUMNS = ("prompt_token_ids", "trajectories")


def _read_trajectories(structs: Any) -> list[Trajectory]:
    fields = {structs.type.field(i).name: structs.field(i) for i in range(structs.type.num_fields)}
    calls = fields["sampling_segments"].to_pylist() if "sampling_segments" in fields else [[]] * len(structs)
    episodes = fields["episode"].to_pylist() if "episode" in fields else [0] * len(structs)
    return [
        Trajectory(
            token_ids=token_ids,
            loss_mask=loss_mask,
            log_probs=log_probs,
            segments=tuple(VersionSegment(**segment) for segment in segments),
            reward=reward,
            finish_reason=finish_reason,
            reward_parts=dict(parts),
            is_baseline=is_baseline,
            sampling_segments=tuple(SamplingSegment(**segment) for segment in samplings),
            episode=episode,
        )
        for token_ids, loss_mask, log_probs, segments, reward, finish_reason, parts, is_baseline, samplings, episode
        in zip(
            _split(fields["token_ids"]), _split(fields["loss_mask"]), _split(fields["log_probs"]),
            fields["segments"].to_pylist(), fields["reward"].to_pylist(), fields["finish_reason"].to_pylist(),
            fields["reward_parts"].to_pylist(), fields["is_baseline"].to_pylist(), calls, episodes, strict=True,
        )
    ]  # fmt: skip


def _split(lists: Any) -> list[NDArray[Any]]:
    values = lists.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(lists.offsets.to_pylist())]


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
