"""Saves and loads checkpoints by the ranks. Training waits while they copy their shards, but not for the files.

    stage (training waits) ─► ranks write ─► flush and rename ─► upload ─► acknowledge
                              └──────────────── during the next steps ───────────────┘

Shards, ledger and step are copied at the same moment. Groups are acknowledged after the rename, and after the upload if
there is one (uploads.py), never before. One checkpoint is written at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cancellation import end_task
from penstock.replay.queue import GroupConsumer
from penstock_learner.checkpoint_files import FileRecord, read_manifest
from penstock_learner.checkpoints.store import CheckpointStore, raise_if_damaged, shards_folder
from penstock_learner.checkpoints.trainer_state import TrainerState
from penstock_learner.crash_points import crash_point
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import SAVE_LANE, RoleGroup, gather_all


@dataclass(eq=False)
class CheckpointWriter:
    """Writes the checkpoints of one term. `on_durable` is called when one is durable, with the prompts that it covers
    and no checkpoint before it."""

    store: CheckpointStore
    queue: GroupConsumer
    trained: Mapping[str, RoleGroup]
    metrics: LearnerMetrics
    on_durable: Callable[[Sequence[int]], None]
    _writing: asyncio.Task[None] | None = None

    async def begin(self, state: TrainerState, prompt_ids: Sequence[int]) -> None:
        """Copy the shards, then write the files in a task while training continues. `prompt_ids` were trained since the
        last checkpoint."""
        await self.wait_until_written()
        started = time.monotonic()
        partial = await asyncio.to_thread(self.store.partial_folder, state.step, state.term)
        with self.store.writing(partial):
            staging = (role.call_all("stage", shards_folder(partial, name)) for name, role in self.trained.items())
            await gather_all(*staging)
        self._writing = asyncio.create_task(self._write(state, list(prompt_ids), started))

    async def wait_until_written(self) -> None:
        """Wait until the checkpoint that is being written, if any, is durable and acknowledged. Raises its error."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def raise_if_failed(self) -> None:
        """Raise the error of a checkpoint that failed. Called between steps, so that a failure is noticed soon."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self) -> None:
        if self._writing is not None:
            self.store.abandon_upload()
            await end_task(self._writing)

    async def _write(self, state: TrainerState, prompt_ids: list[int], started: float) -> None:
        partial = self.store.partial_path(state.step, state.term)
        with self.store.writing(partial):
            saving = (role.call_all_in_lane(SAVE_LANE, "finish_saving") for role in self.trained.values())
            written = dict(zip(self.trained, await gather_all(*saving), strict=True))
        crash_point("before_flush")
        checkpoint = await asyncio.to_thread(self.store.finish, partial, state, _shards(partial, written))
        await asyncio.to_thread(self.store.upload, checkpoint)
        self.on_durable(prompt_ids)
        crash_point("after_flush")
        await self.queue.commit(state.step, prompt_ids, await asyncio.to_thread(self.store.oldest_step))
        crash_point("after_commit")
        self.metrics.checkpoint_seconds.observe(time.monotonic() - started)
        self.metrics.checkpoint_success.set_to_current_time()


def _shards(partial: Path, written: Mapping[str, Sequence[Mapping[str, FileRecord]]]) -> dict[str, FileRecord]:
    """The files of all ranks by their paths in the checkpoint. `written` has each rank's files by name, by role."""
    return {
        str((shards_folder(partial, role) / name).relative_to(partial)): record
        for role, ranks in written.items()
        for files in ranks
        for name, record in files.items()
    }


async def load_checkpoint(path: Path, trained: Mapping[str, RoleGroup]) -> None:
    """Verify a checkpoint, then restore the trained roles from it. Raises CheckpointDamaged if a file is damaged; the
    roles are unchanged then. It raises the same if the weights are not finite; the roles must be restored again then.
    All ranks share the verification."""
    files = await asyncio.to_thread(read_manifest, path)
    ranks = [(role, rank) for role in trained.values() for rank in range(role.num_ranks)]
    shares = [dict(sorted(files.items())[index :: len(ranks)]) for index in range(len(ranks))]
    found = await gather_all(
        *(role.call_rank(rank, "find_damage", path, share) for (role, rank), share in zip(ranks, shares, strict=True))
    )
    raise_if_damaged([damage for of_rank in found for damage in of_rank])
    await gather_all(*(role.call_all("restore", shards_folder(path, name)) for name, role in trained.items()))
