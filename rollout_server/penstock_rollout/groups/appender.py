"""Appends finished groups to the queue, several groups in one exchange with Redis."""

from __future__ import annotations

import asyncio

from penstock.replay.contract import GroupProducer
from penstock.replay.queue_types import AppendOutcome, FinishedGroup
from penstock.store.redis_client import EXCHANGES_AT_ONCE

MAX_GROUPS = 64
"""Upper bound on the groups of one exchange."""


class GroupAppender:
    """Batches the appends of concurrent callers.

    At most EXCHANGES_AT_ONCE exchanges run at a time. Groups that finish meanwhile wait and share the next exchange. A
    failed exchange fails every group in it and no other.
    """

    def __init__(self, queue: GroupProducer) -> None:
        self.queue = queue
        self._waiting: list[tuple[FinishedGroup, asyncio.Future[AppendOutcome]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def append(self, group: FinishedGroup) -> AppendOutcome:
        """Append one group and return the queue's outcome, as `GroupProducer.append` does.

        Cancelling the caller does not take the group back: it may still be appended."""
        outcome: asyncio.Future[AppendOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, outcome))
        if len(self._senders) < EXCHANGES_AT_ONCE:
            self._senders.add(asyncio.create_task(self._send()))
        return await outcome

    async def _send(self) -> None:
        """Exchange until no group waits.

        There is no await between the last check of `_waiting` and the removal from `_senders`, so no group is missed: a
        group that arrives later starts a new sender."""
        try:
            while self._waiting:
                await self._exchange()
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._senders.discard(task)

    async def _exchange(self) -> None:
        batch, self._waiting = self._waiting[:MAX_GROUPS], self._waiting[MAX_GROUPS:]
        try:
            outcomes = await self.queue.append_many([group for group, _ in batch])
        except Exception as error:
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
        else:
            for (_, waiting), outcome in zip(batch, outcomes, strict=True):
                if not waiting.done():
                    waiting.set_result(outcome)
