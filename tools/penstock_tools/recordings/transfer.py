"""Exports a queue to a file and imports it, so that a recorded run can be replayed without rollout servers.

Export only reads, a few groups at a time; a group that is committed before its turn is skipped. Import makes each row a
new prompt by `queue.accept`, so the counts of the queue stay right and the byte limit holds: it waits for room. The
learner takes the groups in the order of the file. A second import of a file adds nothing; an interrupted one goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.errors import InvalidInput, PenstockError, QueueFull
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import OfferedGroup, Origin
from penstock.v1 import prompts_pb2
from penstock_tools.recordings.file import RecordedGroup, Recording, RecordingWriter

ORIGIN = "import"
"""It holds the leases during an import. The groups keep the names of the servers that made them."""
FETCH_GROUPS = 16
IMPORT_GROUPS = 64
POLL_S = 0.2


async def export_groups(
    inspector: QueueInspector, path: Path, *, include_delivered: bool, advance: Callable[[int, int], None]
) -> tuple[int, int, list[str]]:
    """Write the queued groups to `path`. `advance(done, total)` is called as it goes. Returns the numbers of groups
    that were written and that were committed meanwhile, and why others cannot be decoded: the learner will dead-letter
    those."""
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
    return num_groups, len(ids) - num_seen, unreadable


async def import_groups(
    inspector: QueueInspector, path: Path, *, epoch: int, wait_s: float, advance: Callable[[int, int], None]
) -> tuple[int, int]:
    """Import every row of `path` into the inspector's run. Returns how many groups were imported, and how many rows an
    earlier import of the same file had imported.

    Raises QueueFull when the queue has had no room for `wait_s`. Another `epoch` imports the same file again."""
    origin = Origin(ORIGIN, await asyncio.to_thread(_import_key, path, epoch))
    num_groups, row = 0, 0
    with Recording(path) as recording:
        advance(0, recording.num_rows)
        batches = recording.batches(IMPORT_GROUPS)
        while batch := await asyncio.to_thread(next, batches, None):
            groups = [
                OfferedGroup(number, recorded.prompt, _priority(path, number, recorded.prompt), recorded.group)
                for number, recorded in enumerate(batch, start=row)
            ]
            num_groups += await _accept(inspector.queue, groups, origin, wait_s)
            row += len(batch)
            advance(row, recording.num_rows)
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
