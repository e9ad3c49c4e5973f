"""Rewinding to a checkpoint: the queue undoes the commits that the checkpoint does not cover."""

from __future__ import annotations

import pytest

from penstock.errors import Conflict
from support.replay_backends import ReplayQueue, assert_conserved, finish, queue_maker, queue_of_backend, submit

__all__ = ["queue_maker", "queue_of_backend"]


async def train(queue: ReplayQueue, step: int, oldest_step: int = 0) -> list[int]:
    """Lease, append, take, publish and commit the two groups of a step."""
    await finish(queue, await queue.lease("s", 2))
    taken = await queue.take(step, 2)
    await queue.publish(step, step, b"")
    assert await queue.commit(step, taken, oldest_step) == 2
    return taken


async def test_prompts_of_the_abandoned_steps_are_leased_and_trained_again(queue: ReplayQueue) -> None:
    ids = await submit(queue, 12)
    await queue.take_term(0)
    for step in (1, 2, 3):
        await train(queue, step)
    await finish(queue, await queue.lease("s", 4))
    assert len(await queue.take(4, 2)) == 2
    before = await queue.stat()
    assert before.trained == 6

    await queue.take_term(0)
    await queue.rewind("/checkpoints/1", 1, ids[2:6])
    after = await queue.stat()
    assert (after.step, after.trained, after.expired, after.delivered, after.queued) == (1, 2, 4, 0, 4)
    assert await queue.rewind_step(1, 2) == {}
    await assert_conserved(queue)
    assert [(await queue.get_prompt(i)).state for i in ids[1:4]] == ["trained", "pending", "pending"]
    committed = await queue.committed()
    assert committed.step == 1 and committed.trained[0] == 0b0110_0000
    assert committed.rewind is not None and committed.rewind.term == queue.term
    assert (await queue.expired_reasons()) == {"abandoned": 4}

    for step in (2, 3):  # the groups that had been taken come first
        taken = await queue.take(step, 2)
        assert taken == ids[2 * step + 2 : 2 * step + 4]
        await queue.publish(step, step, b"")
        await queue.commit(step, taken)
    leases = await queue.lease("s", 4)
    assert [lease.prompt_id for lease in leases] == ids[2:6], "admission goes on, with the abandoned prompts first"
    assert {lease.attempt for lease in leases} == {3}, "an old group in an outbox is superseded"
    await assert_conserved(queue)


async def test_a_run_cannot_rewind_further_than_its_oldest_checkpoint(queue: ReplayQueue) -> None:
    ids = await submit(queue, 12)
    await queue.take_term(0)
    for step in (1, 2, 3):
        await train(queue, step, oldest_step=step - 1)
    assert (await queue.committed()).kept_after == 2
    stat = await queue.stat()
    with pytest.raises(Conflict, match="2 prompts that were trained after step 1"):
        await queue.rewind("/checkpoints/1", 1, ids[2:6])
    assert await queue.stat() == stat
    await queue.rewind("/checkpoints/2", 2, ids[4:6])
    assert (await queue.stat()).trained == 4


async def test_the_bitmap_of_trained_prompts_says_which(queue: ReplayQueue) -> None:
    ids = await submit(queue, 40)
    await queue.take_term(0)
    for step in range(1, 20):
        await train(queue, step)
    trained = (await queue.committed()).trained
    assert [i for i in range(8 * len(trained)) if trained[i // 8] & 128 >> i % 8] == ids[:38]
