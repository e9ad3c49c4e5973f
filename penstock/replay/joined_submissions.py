"""Submitting for many clients: what comes while one exchange with Redis is under way goes together in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.replay.contract import Submission
from penstock.replay.redis_queue import RedisReplayQueue

MAX_PROMPTS = 2_048
"""In one exchange: Redis answers nobody else meanwhile."""
LINGER_S = 0.001
"""How long an exchange waits for company, where the one before had some: an exchange costs more than what is in it."""


@dataclass(frozen=True)
class _Request:
    payloads: Sequence[bytes]
    priorities: Sequence[int]
    idempotency_key: str
    answer: asyncio.Future[Submission]


class JoinedSubmissions:
    """One exchange at a time, in the order of arrival. Each request is accepted whole or not at all, as if it were
    alone; a failed exchange fails every request in it, and no other."""

    def __init__(self, queue: RedisReplayQueue) -> None:
        self.queue = queue
        self._waiting: list[_Request] = []
        self._sender: asyncio.Task[None] | None = None

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        """What `PromptIntake.submit` answers. Cancelling the caller does not take the request back."""
        answer: asyncio.Future[Submission] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(payloads, priorities, idempotency_key, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        requests: list[_Request] = []
        while self._waiting:
            if len(requests) > 1:
                await asyncio.sleep(LINGER_S)
            requests = self._next()
            try:
                answers = await self.queue.submit_many(
                    [(request.payloads, request.priorities, request.idempotency_key) for request in requests]
                )
            except Exception as error:
                for request in requests:
                    if not request.answer.done():
                        request.answer.set_exception(error)
            else:
                for request, submission in zip(requests, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(submission)

    def _next(self) -> list[_Request]:
        """At least one, and others as far as they fit."""
        count, num_prompts = 1, len(self._waiting[0].payloads)
        while count < len(self._waiting) and num_prompts + len(self._waiting[count].payloads) <= MAX_PROMPTS:
            num_prompts += len(self._waiting[count].payloads)
            count += 1
        requests, self._waiting = self._waiting[:count], self._waiting[count:]
        return requests
