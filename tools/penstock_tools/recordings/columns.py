"""Recorded groups as Arrow columns: one row per group, with types that any Parquet reader can show.

Arrays are converted as whole columns, never token by token. This module imports pyarrow, which is slow, at its top:
import it only where it is needed.

Recordings of version 1 have trajectories without `sampling_segments`, those of version 2 without `episode`. They are
read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.trajectory import Group, Sampling, SamplingSegment, Trajectory, VersionSegment

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
