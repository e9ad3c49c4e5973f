from __future__ import annotations

import asyncio

import pytest

from penstock.cancellation import end_task, to_the_end


async def test_a_last_call_ends_although_its_task_is_cancelled_again_and_again() -> None:
    has_ended = False

    async def last_call() -> None:
        nonlocal has_ended
        await asyncio.sleep(0.05)
        has_ended = True

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await to_the_end(last_call(), 30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.001)
    await end_task(task)
    assert task.cancelled() and has_ended


async def test_a_last_call_that_hangs_is_cancelled_at_its_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        await to_the_end(asyncio.sleep(60), 0.05)
