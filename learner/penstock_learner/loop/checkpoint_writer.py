"""Checkpoints beside training: the ranks copy their shards, training goes on, and files are written meanwhile.

    stage (training waits) ─► ranks write ─► flush and rename ─► acknowledge
                              └────────── beside the next steps ──────────┘

The copy, the ledger and the step are of the same moment. Groups are acknowledged after the rename, never before. One
checkpoint is written at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.cancellation import end_task
from penstock.replay.contract import GroupConsumer
from penstock_learner.crash_points import crash_point
from penstock_learner.loop.checkpoint import CheckpointStore, TrainerState, shards_folder
from penstock_learner.loop.ledger import Ledger
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.placement import SAVE_LANE
from penstock_learner.roles.role_group import RoleGroup, all_ended


class CheckpointWriter:
    """Of one term. `begin` when a step has ended, `settle` when nothing may be left open."""

    def __init__(
        self,
        store: CheckpointStore,
        queue: GroupConsumer,
        trained: Mapping[str, RoleGroup],
        ledger: Ledger,
        metrics: LearnerMetrics,
        on_durable: Callable[[], None],
    ) -> None:
        self.store = store
        self.queue = queue
        self.trained = trained
        self.ledger = ledger
        self.metrics = metrics
        self.on_durable = on_durable
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, state: TrainerState, prompt_ids: Sequence[int]) -> None:
        """Copy the shards; the rest goes on beside training. `prompt_ids` are those trained since the last one."""
        await self.settle()
        started = time.monotonic()
        partial = self.store.partial_folder(state.step, state.term)
        with self.store.writing(partial):
            staging = (role.call_all("stage", shards_folder(partial, name)) for name, role in self.trained.items())
            await all_ended(*staging)
        self._writing = asyncio.create_task(self._write(state, list(prompt_ids), started))

    async def settle(self) -> None:
        """Wait for the checkpoint being written, if any: it is durable and acknowledged, or its error is raised."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def raise_if_failed(self) -> None:
        """Between steps: a checkpoint that cannot be written must not stay unnoticed until the next."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self) -> None:
        if self._writing is not None:
            await end_task(self._writing)

    async def _write(self, state: TrainerState, prompt_ids: list[int], started: float) -> None:
        partial = self.store.partial_path(state.step, state.term)
        with self.store.writing(partial):
            await all_ended(*(role.call_all_beside(SAVE_LANE, "finish_saving") for role in self.trained.values()))
        crash_point("before_flush")
        await asyncio.to_thread(self.store.finish, partial, state)
        self.ledger.mark_durable(prompt_ids)
        self.on_durable()
        crash_point("after_flush")
        await self.queue.commit(state.step, prompt_ids)
        crash_point("after_commit")
        self.metrics.checkpoint_seconds.observe(time.monotonic() - started)
        self.metrics.checkpoint_success.set_to_current_time()
