"""Waits for prompts and for groups: a wait ends with the change that it waits for, and no change is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.replay_backends import MakeQueue, ReplayQueue, finish, queue_maker, submit

__all__ = ["queue_maker"]
FOREVER_S = 80.0
"""Longer than the tests wait, and shorter than Redis may block a command of `redis_client`: half of its deadline."""


async def ends(wait: Callable[[float], Awaitable[None]], change: Callable[[], Awaitable[object]]) -> None:
    """Check that a wait that was started before the change ends with it."""
    waiting = asyncio.create_task(wait(FOREVER_S))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not waiting.done(), "it returned without a change"
    await change()
    async with asyncio.timeout(FOREVER_S / 2):
        await waiting


async def drained(wait: Callable[[float], Awaitable[None]]) -> None:
    """Wait until no signal is left."""
    await wait(0.05)
    await wait(0.05)


async def test_new_prompts_room_and_returned_prompts_end_the_wait_for_prompts(make_queue: MakeQueue) -> None:
    queue, server = make_queue(capacity_bytes=2**20), make_queue(capacity_bytes=2**20)
    await queue.take_term(0)
    await ends(server.wait_for_prompts, lambda: submit(queue, 6))
    leases = await server.lease("s", 8)
    assert len(leases) == 4, "admission holds the others back"
    await drained(server.wait_for_prompts)
    await ends(server.wait_for_prompts, lambda: queue.give_back("s", leases[3]))
    await ends(server.wait_for_prompts, lambda: queue.create_evaluation("e", [b"q"]))
    for lease in leases[:2]:
        assert await queue.append(lease, bytes(2**19), 0) == "accepted"  # the queue is full until one is taken
    await ends(server.wait_for_prompts, lambda: queue.take(1, 2))
    await ends(server.wait_for_prompts, lambda: queue.publish(1, 1, b""))


async def test_groups_end_the_wait_for_groups(make_queue: MakeQueue) -> None:
    queue, learner = make_queue(max_attempts=1), make_queue()
    await learner.take_term(0)
    await submit(queue, 4)
    first, second, third, _ = await queue.lease("s", 4)
    await ends(learner.wait_for_groups, lambda: finish(queue, [first]))
    assert await learner.take(1, 4) == [first.prompt_id]
    await drained(learner.wait_for_groups)
    await ends(learner.wait_for_groups, lambda: queue.give_back("s", second, "oops"))  # no group waits for a dead one
    await ends(learner.wait_for_groups, lambda: finish(queue, [third]))


@pytest.mark.parametrize("what", ["prompts", "groups"])
async def test_a_change_between_two_waits_is_not_missed(make_queue: MakeQueue, what: str) -> None:
    queue, waiter = make_queue(), make_queue()
    await submit(queue, 2)
    leases = await queue.lease("s", 2)
    await finish(queue, leases[:1])
    wait = waiter.wait_for_prompts if what == "prompts" else waiter.wait_for_groups
    await drained(wait)
    await (submit(queue, 1) if what == "prompts" else finish(queue, leases[1:]))
    async with asyncio.timeout(FOREVER_S / 2):
        await wait(FOREVER_S)


async def test_a_wait_ends_by_itself(make_queue: MakeQueue) -> None:
    queue: ReplayQueue = make_queue()
    async with asyncio.timeout(FOREVER_S):
        await queue.wait_for_prompts(0.05)
        await queue.wait_for_groups(0.05)
