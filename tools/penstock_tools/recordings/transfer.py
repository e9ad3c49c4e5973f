"""Exports a queue to a file and imports it, so that a recorded run can be replayed without rollout servers.

Export only reads. It lists the groups first, then fetches them a few at a time, so its memory does not grow with the
queue. A group that is committed before its turn is skipped.

Import makes each row a new prompt. One atomic call submits and leases the prompts without asking for admission: the
groups exist already, and holding them back would only stall. Then the groups are appended like any others. So the
counts of the queue stay right and the byte limit holds: an import waits for room. The learner takes the groups in the
order of the file. A second import of the same file adds nothing; an interrupted one goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from penstock.codec import encode_group
from penstock.errors import InvalidInput, PenstockError, QueueFull
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue_types import AppendOutcome, Lease
from penstock.trajectory import Group
from penstock.v1 import prompts_pb2
from penstock_tools.recordings.file import RecordedGroup, Recording, RecordingWriter

SERVER_ID = "import"
"""Server that holds the leases during an import. The groups keep the names of the servers that made them."""
FETCH_GROUPS = 16
IMPORT_GROUPS = 64
POLL_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True)
class Exported:
    num_groups: int
    num_committed: int
    """Groups that were committed while the export ran."""
    unreadable: tuple[str, ...]
    """Groups that were skipped because they cannot be decoded, with the reason. The learner will dead-letter them."""


@dataclass(frozen=True)
class Imported:
    num_groups: int
    num_present: int
    """Rows that an earlier import of the same file had imported."""


async def export_groups(
    inspector: QueueInspector, path: Path, *, include_delivered: bool, advance: Callable[[int, int], None]
) -> Exported:
    """Write the queued groups to `path`. `advance(done, total)` is called as it goes."""
    ids = await inspector.queued_ids(include_delivered=include_delivered)
    num_groups, num_seen, unreadable = 0, 0, []
    advance(0, len(ids))
    with RecordingWriter(path) as writer:
        for start in range(0, len(ids), FETCH_GROUPS):
            found = await inspector.groups(ids[start : start + FETCH_GROUPS])
            prompts = await inspector.queue.prompts([queued.prompt_id for queued in found])
            num_seen += len(found)
            for queued, prompt in zip(found, prompts, strict=True):
                if queued.group is None:
                    unreadable.append(f"prompt {queued.prompt_id}: {queued.problem}")
                    continue
                await asyncio.to_thread(writer.write, RecordedGroup(queued.group, prompt))
                num_groups += 1
            advance(min(start + FETCH_GROUPS, len(ids)), len(ids))
    return Exported(num_groups, len(ids) - num_seen, tuple(unreadable))


async def import_groups(
    inspector: QueueInspector,
    path: Path,
    *,
    epoch: int,
    wait_s: float,
    advance: Callable[[int, int], None],
) -> Imported:
    """Import every row of `path` into the inspector's run.

    Raises QueueFull when the queue has had no room for `wait_s`. Another `epoch` imports the same file again."""
    importer = _Importer(inspector, await asyncio.to_thread(_import_key, path, epoch), wait_s)
    num_groups, row = 0, 0
    with Recording(path) as recording:
        advance(0, recording.num_rows)
        batches = recording.batches(IMPORT_GROUPS)
        while batch := await asyncio.to_thread(next, batches, None):
            num_groups += await importer.add(path, row, batch)
            row += len(batch)
            advance(row, recording.num_rows)
    return Imported(num_groups, row - num_groups)


class _Importer:
    """Imports batches of rows. Its leases are short and renewed while it waits, so a dead import blocks no one."""

    def __init__(self, inspector: QueueInspector, key: str, wait_s: float) -> None:
        self.inspector = inspector
        self.queue = inspector.queue
        self.key = key
        self.wait_s = wait_s

    async def add(self, path: Path, first_row: int, batch: Sequence[RecordedGroup]) -> int:
        """Import the rows. Returns how many of them were new."""
        rows = [
            (number, recorded.prompt, _priority(path, number, recorded.prompt))
            for number, recorded in enumerate(batch, start=first_row)
        ]
        lease_ttl_s = self.queue.config.lease_ttl_s
        leases = await self._when_there_is_room(
            lambda: self.inspector.import_prompts(self.key, SERVER_ID, lease_ttl_s, rows), held=()
        )
        wanted = [(lease, recorded) for lease, recorded in zip(leases, batch, strict=True) if lease.attempt]
        num_new = 0
        for index, (lease, recorded) in enumerate(wanted):
            held = [lease for lease, _ in wanted[index:]]
            num_new += await self._append(lease, recorded.group, held)
        return num_new

    async def _append(self, lease: Lease, group: Group, held: Sequence[Lease]) -> bool:
        group = replace(group, run=self.inspector.run, prompt_id=lease.prompt_id, attempt=lease.attempt)
        payload = await asyncio.to_thread(encode_group, group)

        async def append() -> AppendOutcome:
            outcome = await self.queue.append(lease, payload, group.min_version)
            if outcome == "full":
                raise QueueFull("the queue is at its byte limit")
            return outcome

        outcome = await self._when_there_is_room(append, held)
        if outcome == "unknown":
            raise PenstockError(f"prompt {lease.prompt_id} vanished during the import; was the run deleted?")
        return outcome == "accepted"

    async def _when_there_is_room(self, call: Callable[[], Awaitable[T]], held: Sequence[Lease]) -> T:
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return await call()
            except QueueFull as error:
                if time.monotonic() >= deadline:
                    raise QueueFull(
                        f"no room for {self.wait_s:.0f} s ({error}); start the learner or raise replay.capacity_bytes, "
                        "then import again: it goes on from here"
                    ) from error
                await self.queue.heartbeat(SERVER_ID, held)
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
        raise InvalidInput(f"{path} row {row}: prompt", "is not an encoded prompt; leave the row out") from error
