"""The group appender sends every group, even one that arrives while the last exchanges end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from penstock.replay.queue_types import AppendOutcome, FinishedGroup, Lease
from penstock.store.redis_client import EXCHANGES_AT_ONCE
from penstock_rollout.groups.producer import GroupAppender

TIMEOUT_S = 60.0


class GatedQueue:
    """Accepts every group, but returns from `append_many` only once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_calls = 0

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        self.num_calls += 1
        await self.gate.wait()
        return ["accepted"] * len(groups)


def group(prompt_id: int) -> FinishedGroup:
    return FinishedGroup(Lease(prompt_id, 1, b""), b"payload", 0)


async def test_a_group_that_finishes_as_the_last_exchanges_end_is_sent_too() -> None:
    queue = GatedQueue()
    appender = GroupAppender(cast(Any, queue))

    async def append_all(*prompt_ids: int) -> None:
        for prompt_id in prompt_ids:
            assert await appender.append(group(prompt_id)) == "accepted"

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as callers:
        for caller in range(EXCHANGES_AT_ONCE):
            callers.create_task(append_all(caller, 100) if caller == 0 else append_all(caller))
            while queue.num_calls <= caller:
                await asyncio.sleep(0)
        queue.gate.set()
