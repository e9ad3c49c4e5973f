"""Keeps the answers of an offline generation on disk, so that an interrupted one can continue, and several processes or
machines can share the work.

Finished rows are written to parts in a folder next to the output, `answers.parquet.parts`. Each part has the settings
that its rows were made with, is whole or absent, and no row is in two parts. Once all rows are there, `finish` merges
the parts into `answers.parquet` in the order of the dataset, and the folder is removed.

Locks of files in the folder:
`lock`               held to open the store and to merge. It makes one process of those that end write the output.
`shard-I-of-N.lock`  held while a process answers shard I of N. All that are held have the same N, so no row is in two.
The folder is removed only after the output is there, so whoever gets a lock looks for the output first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset, parquet

from penstock.errors import InvalidInput, Unavailable, one_line
from penstock.machine import written_whole
from penstock.trajectory import Prompt
from penstock_tools.offline.shard import WHOLE, Shard

# ── rows without their prompts ──

ROW_SCHEMA = pa.schema(
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
class AnswerRow:
    """All samples of one row of the dataset. The lists have one entry per sample and are empty if the row failed."""

    row: int
    responses: list[str] = field(default_factory=list)
    token_ids: list[Any] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    loss_masks: list[Any] = field(default_factory=list)
    """1 for tokens that the model sampled, 0 for tokens that a tool or an interaction inserted."""
    finish_reasons: list[str] = field(default_factory=list)
    rewards: list[float] | None = None
    error: str | None = None


@dataclass
class Totals:
    """Sums over rows on disk."""

    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0

    def add(self, table: Any) -> None:
        """Add the rows of a table that has TOTALS_COLUMNS."""
        tokens = pc.list_value_length(pc.list_flatten(table["loss_masks"]))
        self.num_samples += len(tokens)
        self.num_tokens += pc.sum(tokens, min_count=0).as_py()
        self.num_failed += pc.count(table["error"]).as_py()
        rewards = pc.list_flatten(table["rewards"])
        self.reward_sum += pc.sum(rewards, min_count=0).as_py()
        self.num_rewards += len(rewards)


TOTALS_COLUMNS = ("loss_masks", "error", "rewards")
"""Masks tell the number of tokens, and are the smallest on disk."""


# ── prompts in verl's schema, so that the answers can be scored later ──

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Any]:
    has_fields = any(prompt.message_fields for prompt in prompts)
    return {
        "prompt": pa.array([prompt.chat for prompt in prompts], None if has_fields else pa.list_(MESSAGE)),
        "data_source": pa.array([prompt.data_source for prompt in prompts], pa.string()),
        "reward_model": json_column([{"ground_truth": prompt.ground_truth} for prompt in prompts]),
        "extra_info": json_column([prompt.extra_info for prompt in prompts]),
        "agent_name": pa.array([prompt.agent_name for prompt in prompts], pa.string()),
    }


def json_column(values: Sequence[Any]) -> Any:
    """An Arrow column of JSON values. Objects become structs. Values that share no Arrow type become JSON text."""
    if any(isinstance(value, dict) for value in values) and all(isinstance(v, dict | None) for v in values):
        return _struct_column(values)
    with contextlib.suppress(pa.ArrowException, OverflowError):
        column = pa.array(values)
        kind = column.type
        while pa.types.is_list(kind):
            kind = kind.value_type
        if not pa.types.is_struct(kind):  # fields of objects in lists may be missing or empty
            return column
    return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())


def _struct_column(values: Sequence[dict[str, Any] | None]) -> Any:
    keys = list(dict.fromkeys(key for value in values if value for key in value))
    if not keys:
        return pa.nulls(len(values))  # Parquet has no struct without fields
    columns = [json_column([value.get(key) if value else None for value in values]) for key in keys]
    return pa.StructArray.from_arrays(columns, names=keys, mask=pa.array([value is None for value in values]))


# ── the store ──

PART_ROWS = 64
PART_S = 5.0
"""A part is due after this many rows or seconds. A kill loses the rows since the last part."""
MERGE_ROWS = 256
SETTINGS_KEY = b"penstock.generate"


LOCK_S = 1800.0
"""How long a process waits while another one reads or merges the parts."""
LOCK_POLL_S = 0.1


class AnswerStore:
    """The answers of one output file. Use it as a context manager, which claims a shard of the rows for one process and
    writes the remaining rows on exit.

    `add` only keeps a row in memory. The caller calls `write_part`, from any thread, when `is_part_due`.
    """

    def __init__(self, output: Path, settings: dict[str, str], shard: Shard = WHOLE) -> None:
        self.output = output
        self.settings = settings
        self.shard = shard
        self.folder = output.with_name(f"{output.name}.parts")
        self.rows: set[int] = set()
        """Rows that are finished: added, in a part that was counted, or in the output file."""
        self.totals = Totals()
        """What the parts that were counted hold, or the output file."""
        self.written = Totals()
        """What this process has written."""
        self.finished = False
        """Whether the output file exists."""
        self._waiting: list[AnswerRow] = []
        self._written_at = time.monotonic()
        self._counted: set[Path] = set()
        self._num_parts = 0
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as resources:
            try:
                self._open(resources)
            except OSError as error:
                reason = f"cannot be written ({error.strerror}); choose another --output"
                raise InvalidInput(str(self.output), reason) from error
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._resources:
            self.write_part()
        if self.finished:  # only now, because NFS keeps a folder in which a file is open
            shutil.rmtree(self.folder, ignore_errors=True)

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
            table = pa.Table.from_pylist([vars(row) for row in rows], schema=self._schema())
            name = f"part-{self.shard.index}-of-{self.shard.count}-{self._num_parts:06d}.parquet"
            with written_whole(self.folder / name, self.folder) as partial:
                parquet.write_table(table, partial, compression="zstd")
            self._num_parts += 1
            del self._waiting[: len(rows)]
            self._counted.add(self.folder / name)
            for totals in (self.totals, self.written):
                totals.add(table)

    def finish(self, prompts: Sequence[Prompt]) -> None:
        """Merge the parts into the output file if every row is there, and no other process has done so."""
        self.write_part()
        if self.finished:
            return
        with self._locked():
            self._count()
            if not self.finished and len(self.rows) == len(prompts):
                self._merge(prompts)

    def _merge(self, prompts: Sequence[Prompt]) -> None:
        prompt_table = pa.table(prompt_columns(prompts))
        schema = self._schema(*prompt_table.schema)
        parts = dataset.dataset([str(part) for part in parts_in(self.folder)], schema=ROW_SCHEMA)
        with (
            written_whole(self.output, self.folder) as partial,
            parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
        ):
            for start in range(0, len(prompts), MERGE_ROWS):
                is_next = (pc.field("row") >= start) & (pc.field("row") < start + MERGE_ROWS)
                answers = parts.to_table(filter=is_next).sort_by("row")
                questions = prompt_table.slice(start, MERGE_ROWS)
                writer.write_table(pa.table([*answers.columns, *questions.columns], schema=schema))
        self.finished = True

    def _open(self, resources: contextlib.ExitStack) -> None:
        if self.output.is_dir() or self.output.suffix != ".parquet":
            raise InvalidInput(str(self.output), "is not the name of a Parquet file; end --output with .parquet")
        if not self.output.parent.is_dir():
            raise InvalidInput(str(self.output), f"there is no folder {self.output.parent}; create it")
        if self.output.exists():
            self._count()
            return
        with self._locked():
            self._count()
            if not self.finished:
                self._claim(resources)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_S
        while (lock := self._try_lock("lock")) is None:
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.folder} is being read or merged by another process; wait for it, or end it")
            time.sleep(LOCK_POLL_S)
        with lock:
            yield

    def _try_lock(self, name: str) -> IO[str] | None:
        """None if another process has locked the file. The lock ends with the file that is returned."""
        while True:
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
                lock = (self.folder / name).open("a")  # NFS locks only files that are open for writing
                break
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                return None
            raise
        return lock

    def _claim(self, resources: contextlib.ExitStack) -> None:
        """Lock the shard. Raises InvalidInput if another process answers it, or some of its rows."""
        for path in self.folder.glob("shard-*-of-*.lock"):
            index, count = path.stem.removeprefix("shard-").split("-of-")
            if int(count) == self.shard.count and int(index) != self.shard.index:
                continue
            if (lock := self._try_lock(path.name)) is None:
                whole, other = int(count) == 1, f"is being written by another process (--shard {index}/{count})"
                reason = "is being written by another process" if whole else other
                same = int(count) in (1, self.shard.count)
                advice = (
                    "" if same else ", or divide the rows as it does: the same N of --shard, and the same --servers"
                )
                raise InvalidInput(str(self.output), f"{reason}; wait for it{advice}")
            lock.close()
        own = self._try_lock(f"shard-{self.shard.index}-of-{self.shard.count}.lock")
        assert own is not None, "the folder is locked"
        resources.enter_context(own)

    def _count(self) -> None:
        if self.output.exists():
            self.rows, self.totals = set(), Totals()
            self._read(self.output, self.output)
            self.finished = True
            return
        for part in parts_in(self.folder):
            if part not in self._counted:
                self._read(part, self.folder)
                self._counted.add(part)
                self._num_parts = max(self._num_parts, int(part.stem.rpartition("-")[2]) + 1)

    def _read(self, file: Path, where: Path) -> None:
        """Count the rows of a part or of the output file. Raises InvalidInput, which names `where`, if they were made
        with other settings."""
        try:
            table = parquet.read_table(file, columns=["row", *TOTALS_COLUMNS])
        except (pa.ArrowException, OSError) as error:
            reason = "exists and is not a file of answers; choose another --output"
            raise InvalidInput(str(where), reason) from error
        found = json.loads((table.schema.metadata or {}).get(SETTINGS_KEY, b"{}"))
        for name, value in self.settings.items():
            if found.get(name) != value:
                given = f"{name} {found.get(name, 'unknown')!r}, not {value!r}"
                reason = f"holds answers with {given}; remove it, or choose another --output"
                raise InvalidInput(str(where), reason)
        rows = table["row"].to_pylist()
        if again := self.rows.intersection(rows):
            raise InvalidInput(str(file), f"holds row {min(again)}, which another part holds too; remove one of them")
        self.rows.update(rows)
        self.totals.add(table)

    def _schema(self, *further: Any) -> Any:
        return pa.schema([*ROW_SCHEMA, *further], metadata={SETTINGS_KEY: json.dumps(self.settings)})


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


@contextlib.contextmanager
def reading_parquet(path: Path, advice: str = "") -> Iterator[None]:
    """Raise InvalidInput, with the advice, if the block cannot read the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(str(path), f"cannot be read as Parquet ({one_line(error)}){advice}") from error
