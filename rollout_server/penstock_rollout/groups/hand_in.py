"""Handing groups in: those that finish while exchanges with the queue are under way go together in the next."""

from __future__ import annotations

import asyncio

from penstock.replay.contract import AppendOutcome, FinishedGroup, GroupProducer
from penstock.store.redis_client import EXCHANGES_AT_ONCE

MAX_GROUPS = 64


class HandIn:
    """As many exchanges at a time as the client makes. A failed one fails every group in it, and no other."""

    def __init__(self, queue: GroupProducer) -> None:
        self.queue = queue
        self._waiting: list[tuple[FinishedGroup, asyncio.Future[AppendOutcome]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def append(self, group: FinishedGroup) -> AppendOutcome:
        """What `GroupProducer.append` answers. Cancelling the caller does not take the group back."""
        answer: asyncio.Future[AppendOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, answer))
        if len(self._senders) < EXCHANGES_AT_ONCE:
            self._senders.add(asyncio.create_task(self._send()))
        return await answer

    async def _send(self) -> None:
        """Until nothing waits. Nobody comes between that and its leaving: whoever comes then starts another."""
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
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for (_, answer), outcome in zip(batch, outcomes, strict=True):
                if not answer.done():
                    answer.set_result(outcome)
