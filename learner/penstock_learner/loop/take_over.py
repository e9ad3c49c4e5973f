"""Taking over a run: a learner takes a new term, and only then chooses the checkpoint that it continues from.

The order matters. Until the term is taken, the learner before this one may still commit, and the checkpoint that was
newest a moment ago no longer covers everything that was acknowledged. From then on nobody else can commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.replay.contract import GroupConsumer
from penstock_learner.checkpoints.checkpoint import TrainerState

Choice = Callable[[], tuple[Path, TrainerState] | None]
"""Chooses the checkpoint to continue from. None: the run starts from the model folder."""


@dataclass(frozen=True)
class TakeOver:
    """A term that was taken, and the state in which it starts."""

    term: int
    store_id: str
    checkpoint: Path | None
    """None: the roles stay as they started, with the weights of the model folder."""
    state: TrainerState


async def take_over(queue: GroupConsumer, choose: Choice, settle_s: float, at_least: int = 0) -> TakeOver:
    """Fence every earlier learner, then choose the checkpoint. The new term is above `at_least`.

    A choice that fails, or that belongs to another store, raises before the term is taken: such a learner fences
    nobody."""
    store_id = await queue.store_id()
    await _choose(choose, store_id)
    term = await queue.take_term(at_least)
    # Redis could still lose the new term, and the term before it would be valid again. So wait before acting under it.
    await asyncio.sleep(settle_s)
    checkpoint, state = await _choose(choose, store_id)
    return TakeOver(term, store_id, checkpoint, state)


async def _choose(choose: Choice, store_id: str) -> tuple[Path | None, TrainerState]:
    checkpoint, state = await asyncio.to_thread(choose) or (None, TrainerState())
    state.check_store(store_id)
    return checkpoint, state


async def restore_batches(queue: GroupConsumer, state: TrainerState) -> dict[int, list[int]]:
    """Acknowledge the groups that the checkpoint covers. Returns the batches that an earlier learner had taken for
    later steps, by step."""
    ledger = state.make_ledger()
    manifests = await queue.restore(state.step)
    covered = [p for step, ids in manifests.items() if step <= state.step for p in ids if p in ledger]
    if covered:
        await queue.commit(state.step, covered)
    return {step: ids for step, ids in manifests.items() if step > state.step}
