"""Exports a queue to a Parquet file and imports it, so that a recorded run can be replayed without rollout servers.

Export only reads, a few groups at a time; a group that is committed before its turn is skipped. Import makes each row a
new prompt by `queue.accept`, so the counts of the queue stay right and the byte limit holds: it waits for room. The
learner takes the groups in the order of the file. A second import of a file adds nothing; an interrupted one goes on.

The file has one row per group, with types that any Parquet reader can show. Arrays are converted whole, never token by
token in Python. A file from elsewhere is read too if it has these columns and types; the fields in OPTIONAL may be
missing. This module imports pyarrow, which is slow, at its top: import it only where it is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pyarrow as pa
from google.protobuf.message import DecodeError
from pyarrow import parquet

from penstock.cli.output import progress_bar
from penstock.codec import check_group
from penstock.errors import InvalidInput, PenstockError, PoisonGroup, QueueFull
from penstock.machine import written_whole
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import OfferedGroup, Origin
from penstock.sampling import SAMPLING_FIELDS, Distribution, Sampling
from penstock.trajectory import FinishReason, Group, SamplingSegment, TokenReward, Trajectory, VersionSegment
from penstock.v1 import prompts_pb2
from penstock_tools.offline.answer_store import reading_parquet

# ── groups as Arrow columns, which have the names of their fields ──

_ARROW_TYPES: dict[Any, Any] = {
    float: pa.float32(),
    int: pa.int32(),
    int | None: pa.int64(),
    bool: pa.bool_(),
    tuple[str, ...]: pa.list_(pa.string()),
}
"""The type of the column for each type that a sampling parameter is declared with."""


def sampling_columns(declared: type[Distribution]) -> list[tuple[str, Any]]:
    """A column for each sampling parameter that the class declares."""
    return [(name, _ARROW_TYPES[kind]) for name, kind in get_type_hints(declared).items()]


_RANGE = [("start", pa.int32()), ("end", pa.int32())]
SEGMENT = pa.struct([*_RANGE, ("policy_version", pa.int64())])
SAMPLING_SEGMENT = pa.struct([*_RANGE, *sampling_columns(Distribution)])
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
        ("reward_failed", pa.bool_()),
        ("token_rewards", pa.list_(pa.struct([("index", pa.int32()), ("reward", pa.float64())]))),
        ("server_ids", pa.list_(pa.string())),
    ]
)
"""All fields of a sample but the experts that the engine chose, which are large: the learner chooses its own."""
OPTIONAL = {
    *SAMPLING_FIELDS, "sampling_segments", "episode", "reward_failed", "token_rewards", "server_ids"
} - {"temperature", "top_p", "max_tokens", "seed"}  # fmt: skip
"""Fields that a file from elsewhere need not have. They have their defaults there."""
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("prompt_id", pa.int64()),
        ("attempt", pa.int32()),
        ("server_id", pa.string()),
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("sampling", pa.struct(sampling_columns(Sampling))),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("trajectories", pa.list_(TRAJECTORY)),
        ("finished_at_ms", pa.int64()),
        ("prompt", pa.binary()),
    ],
    metadata={"penstock.recording": "5"},
)
_GROUP = pa.struct([field for field in SCHEMA if field.name != "prompt"])


@dataclass(frozen=True)
class RecordedGroup:
    group: Group
    prompt: bytes
    """The encoded prompt that the group answers; empty if the recorded run no longer had it."""


def to_record_batch(rows: Sequence[RecordedGroup]) -> Any:
    groups = [{**_plain(_GROUP, row.group), "prompt": row.prompt} for row in rows]
    return pa.RecordBatch.from_pylist(groups, schema=SCHEMA)


def _plain(kind: Any, value: Any) -> Any:
    """The value with mappings for objects and pairs for mappings, from which pyarrow makes columns. Arrays stay."""
    if pa.types.is_struct(kind):
        return {field.name: _plain(field.type, getattr(value, field.name)) for field in kind}
    if pa.types.is_map(kind):
        return list(value.items())
    is_objects = pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)
    return [_plain(kind.value_type, each) for each in value] if is_objects else value


def from_record_batch(batch: Any) -> list[RecordedGroup]:
    """The rows of a batch that has SCHEMA's columns and no others, and nulls only as seeds."""
    return [_recorded(**fields) for fields in _values(batch.to_struct_array())]


def _recorded(prompt: bytes, trajectories: Any, sampling: Any, **fields: Any) -> RecordedGroup:
    samples = tuple(_trajectory(**each) for each in trajectories)
    return RecordedGroup(Group(sampling=Sampling(**sampling), trajectories=samples, **fields), prompt)


def _trajectory(segments: Any, sampling_segments: Any = (), token_rewards: Any = (), **fields: Any) -> Trajectory:
    return Trajectory(
        segments=tuple(VersionSegment(**each) for each in segments),
        sampling_segments=tuple(SamplingSegment(**each) for each in sampling_segments),
        token_rewards=tuple(TokenReward(**each) for each in token_rewards),
        **fields,
    )


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
    inner: list[Any] = []
    if isinstance(array, pa.MapArray):
        inner = [array.keys, array.items]
    elif isinstance(array, pa.ListArray):
        inner = [array.values]
    elif isinstance(array, pa.StructArray):
        inner = [array.field(index) for index in range(array.type.num_fields)]
    return array.null_count > 0 or any(map(has_nulls, inner))


def _is_readable(found: Any, wanted: Any) -> bool:
    """Whether a column of this type has all the fields that are wanted, except the ones in OPTIONAL."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return _is_readable(found.value_type, wanted.value_type)
    if not (pa.types.is_struct(found) and pa.types.is_struct(wanted)):
        return bool(found == wanted)
    of_found, of_wanted = ({field.name: field.type for field in kind} for kind in (found, wanted))
    return of_found.keys() <= of_wanted.keys() and all(
        _is_readable(of_found[name], kind) if name in of_found else name in OPTIONAL for name, kind in of_wanted.items()
    )


# ── the file ──

ROW_GROUP_ROWS = 512
ROW_GROUP_BYTES = 32 * 2**20
"""Upper bound on the bytes of arrays in a row group. An export or import needs a small multiple of it in memory."""
EXPORT_AGAIN = "; export it again"


@contextmanager
def writing(path: Path) -> Iterator[Callable[[RecordedGroup], None]]:
    """Yields a function that adds a row. Row groups are written as they fill. The complete file appears when the block
    ends without an error."""
    rows: list[RecordedGroup] = []
    num_bytes = 0

    def write(row: RecordedGroup) -> None:
        nonlocal num_bytes
        rows.append(row)
        num_bytes += len(row.prompt) + 9 * row.group.num_response_tokens + row.group.prompt_token_ids.nbytes
        if len(rows) >= ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
            flush()

    def flush() -> None:
        nonlocal num_bytes
        if rows:
            writer.write_batch(to_record_batch(rows))
        rows.clear()
        num_bytes = 0

    try:
        with (
            written_whole(path) as partial,
            partial.open("wb") as file,
            parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer,
        ):
            yield write
            flush()
    except OSError as error:
        why = error.strerror or error
        raise InvalidInput(str(path), f"cannot be written ({why}); free space or choose another path") from error


def _batches(path: Path, file: Any, batch_rows: int) -> Iterator[list[RecordedGroup]]:
    """Every row in the file's order, in batches of at most `batch_rows`, checked as they are read."""
    _check_columns(path, file.schema_arrow)
    row = 0
    with reading_parquet(path, EXPORT_AGAIN):
        for batch in file.iter_batches(batch_size=batch_rows, columns=SCHEMA.names):
            yield _checked(path, batch, row)
            row += batch.num_rows


def _checked(path: Path, batch: Any, first_row: int) -> list[RecordedGroup]:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "sampling":
            _check_sampling(path, column, first_row)
        elif has_nulls(column):
            raise InvalidInput(f"{path} column {name}", f"has nulls in rows from {first_row}; fill them in")
    rows = from_record_batch(batch)
    for number, row in enumerate(rows, start=first_row):
        try:
            check_group(row.group)
        except PoisonGroup as error:
            raise InvalidInput(f"{path} row {number}", f"{error}; remove the row") from error
        for trajectory in row.group.trajectories:
            if trajectory.finish_reason not in (known := get_args(FinishReason)):
                raise InvalidInput(f"{path} row {number}", f"finish_reason is not one of {known}")
    return rows


def _check_sampling(path: Path, column: Any, first_row: int) -> None:
    """Refuse a row without the parameters that its tokens were sampled with. Only the seed may be missing."""
    for index, field in enumerate(column.type):
        if field.name != "seed" and (column.null_count or has_nulls(column.field(index))):
            raise InvalidInput(
                f"{path} column sampling.{field.name}",
                f"has nulls in rows from {first_row}; fill in what the tokens were sampled with: the learner computes "
                "their log-probs with it",
            )


def _check_columns(path: Path, found: Any) -> None:
    for field in SCHEMA:
        if field.name not in found.names:
            why = f"has no column `{field.name}`; `penstock queue export` writes what this reads"
            raise InvalidInput(str(path), why)
        kind = found.field(field.name).type
        if not _is_readable(kind, field.type):
            raise InvalidInput(f"{path} column {field.name}", f"is {kind}, not {field.type}; cast it")


# ── from a queue and back ──

ORIGIN = "import"
"""It holds the leases during an import. The groups keep the names of the servers that made them."""
FETCH_GROUPS = 16
IMPORT_GROUPS = 64
POLL_S = 0.2


async def export_groups(
    inspector: QueueInspector, path: Path, *, include_delivered: bool
) -> tuple[int, int, list[str]]:
    """Write the queued groups to `path`. Returns the numbers of groups that were written and that were committed
    meanwhile, and why others cannot be decoded: the learner will dead-letter those."""
    ids = await inspector.queued_ids(include_delivered=include_delivered)
    num_groups, num_seen, unreadable = 0, 0, []
    with writing(path) as write, progress_bar("exporting") as progress:
        task = progress.add_task("", total=len(ids))
        for start in range(0, len(ids), FETCH_GROUPS):
            wanted = ids[start : start + FETCH_GROUPS]
            found = await inspector.groups(wanted)
            prompts = await inspector.queue.prompts([queued.prompt_id for queued in found])
            num_seen += len(found)
            for queued, prompt in zip(found, prompts, strict=True):
                if queued.group is None:
                    unreadable.append(f"prompt {queued.prompt_id}: {queued.problem}")
                    continue
                await asyncio.to_thread(write, RecordedGroup(queued.group, prompt))
                num_groups += 1
            progress.advance(task, len(wanted))
    return num_groups, len(ids) - num_seen, unreadable


async def import_groups(inspector: QueueInspector, path: Path, *, epoch: int, wait_s: float) -> tuple[int, int]:
    """Import every row of `path` into the inspector's run. Returns how many groups were imported, and how many rows an
    earlier import of the same file had imported.

    Raises QueueFull when the queue has had no room for `wait_s`. Another `epoch` imports the same file again."""
    origin = Origin(ORIGIN, await asyncio.to_thread(_import_key, path, epoch))
    num_groups, row = 0, 0
    with reading_parquet(path, EXPORT_AGAIN):
        # Pre-buffering would keep every row group in memory after it was read.
        file = parquet.ParquetFile(path, pre_buffer=False)
    with file, progress_bar("importing") as progress:
        task = progress.add_task("", total=file.metadata.num_rows)
        batches = _batches(path, file, IMPORT_GROUPS)
        while batch := await asyncio.to_thread(next, batches, None):
            groups = [
                OfferedGroup(number, recorded.prompt, _priority(path, number, recorded.prompt), recorded.group)
                for number, recorded in enumerate(batch, start=row)
            ]
            num_groups += await _accept(inspector.queue, groups, origin, wait_s)
            row += len(batch)
            progress.advance(task, len(batch))
    return num_groups, row - num_groups


async def _accept(queue: RedisReplayQueue, groups: Sequence[OfferedGroup], origin: Origin, wait_s: float) -> int:
    """Add the groups in order, as soon as there is room. Returns how many of them were new."""
    num_new, deadline, full = 0, time.monotonic() + wait_s, "the queue is at its byte limit"
    while True:
        try:
            accepted = await queue.accept(groups, origin)
        except QueueFull as error:
            full, accepted = str(error), []
        for prompt_id, outcome in accepted:
            if outcome == "unknown":
                raise PenstockError(f"prompt {prompt_id} vanished during the import; was the run deleted?")
        outcomes = [outcome for _, outcome in accepted]
        num_new += outcomes.count("accepted")
        if accepted:
            groups = [group for group, outcome in zip(groups, outcomes, strict=True) if outcome == "full"]
        if not groups:
            return num_new
        if "accepted" in outcomes:
            deadline = time.monotonic() + wait_s
        if time.monotonic() >= deadline:
            raise QueueFull(
                f"no room for {wait_s:.0f} s ({full}); start the learner or raise replay.capacity_bytes, then import "
                "again: it goes on from here"
            )
        await asyncio.sleep(POLL_S)


def _import_key(path: Path, epoch: int) -> str:
    try:
        with path.open("rb") as file:
            return f"import-{hashlib.file_digest(file, 'sha256').hexdigest()}-{epoch}"
    except OSError as error:
        raise InvalidInput(
            str(path), f"cannot be read ({error.strerror}); `penstock queue export` writes one"
        ) from error


def _priority(path: Path, row: int, prompt: bytes) -> int:
    """Priority of the recorded prompt. It applies if the group expires and the prompt is generated again."""
    try:
        return prompts_pb2.Prompt.FromString(prompt).priority
    except DecodeError as error:
        raise InvalidInput(f"{path} row {row}: prompt", "is not an encoded prompt; remove the row") from error
