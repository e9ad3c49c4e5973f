"""Handing groups in: those that finish while one exchange with the queue is under way go together in the next."""

from __future__ import annotations

import asyncio

from penstock.replay.contract import AppendOutcome, FinishedGroup, GroupProducer

MAX_GROUPS = 64


class HandIn:
    """One exchange at a time, in the order of finishing. A failed exchange fails every group in it, and no other."""

    def __init__(self, queue: GroupProducer) -> None:
        self.queue = queue
        self._waiting: list[tuple[FinishedGroup, asyncio.Future[AppendOutcome]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def append(self, group: FinishedGroup) -> AppendOutcome:
        """What `GroupProducer.append` answers. Cancelling the caller does not take the group back."""
        answer: asyncio.Future[AppendOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
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
