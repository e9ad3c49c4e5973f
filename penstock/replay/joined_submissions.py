"""Submitting for many clients: what comes while one exchange with Redis is under way goes together in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import DeadlineExceeded
from penstock.replay.contract import Submission
from penstock.replay.redis_queue import RedisReplayQueue

MAX_PROMPTS = 2_048
"""In one exchange: Redis answers nobody else meanwhile."""
MAX_REQUESTS = 32
"""In one exchange: clients of the one before are answered while Redis works on the next."""
LINGER_S = 0.001
MAX_LINGERS = 4
"""An exchange costs more than what is in it. So it waits for company, where those before had some: LINGER_S at a time,
for as long as more comes and until as many are there as usual."""
FADE = 7 / 8
"""Of what was usual, with every exchange."""
ENOUGH_PROMPTS = 256
"""No more company is waited for."""


@dataclass(slots=True)
class _Request:
    payloads: Sequence[bytes]
    priorities: Sequence[int]
    idempotency_key: str
    answer: asyncio.Future[Submission]
    deadline: float


class JoinedSubmissions:
    """One exchange at a time, in the order of arrival. Each request is accepted whole or not at all, as if it were
    alone; a failed exchange fails every request in it, and no other. A request that has no answer after `deadline_s`
    fails with DeadlineExceeded, and may have been accepted."""

    def __init__(self, queue: RedisReplayQueue, deadline_s: float) -> None:
        self.queue = queue
        self.deadline_s = deadline_s
        self._waiting: list[_Request] = []
        self._sent: list[_Request] = []
        self._sender: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        """One for all requests: their deadlines come in the order in which they came."""
        self._count = 0
        self._usual_count = 1.0
        """How many requests went in the last exchange, and in the fullest one lately."""

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        """What `PromptIntake.submit` answers. Cancelling the caller does not take the request back."""
        loop = asyncio.get_running_loop()
        request = _Request(payloads, priorities, idempotency_key, loop.create_future(), loop.time() + self.deadline_s)
        self._waiting.append(request)
        if self._alarm is None:
            self._alarm = loop.call_at(request.deadline, self._expire)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await request.answer

    async def _send(self) -> None:
        while self._waiting:
            await self._linger()
            self._sent = self._next()
            self._count = len(self._sent)
            self._usual_count = max(self._count, self._usual_count * FADE)
            try:
                answers = await self.queue.submit_many(
                    [(request.payloads, request.priorities, request.idempotency_key) for request in self._sent]
                )
            except Exception as error:
                for request in self._sent:
                    if not request.answer.done():
                        request.answer.set_exception(error)
            else:
                for request, submission in zip(self._sent, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(submission)
            self._sent = []

    async def _linger(self) -> None:
        """Not after a full exchange: to answer it takes as long, and what came meanwhile would wait twice."""
        if self._usual_count < 1.5 or self._count >= MAX_REQUESTS:
            return
        for _ in range(MAX_LINGERS):
            count = len(self._waiting)
            if count >= self._usual_count or self._num_prompts() >= ENOUGH_PROMPTS:
                return
            await asyncio.sleep(LINGER_S)
            if len(self._waiting) == count:
                return

    def _num_prompts(self) -> int:
        return sum(len(request.payloads) for request in self._waiting)

    def _next(self) -> list[_Request]:
        """At least one, and others as far as they fit."""
        count, num_prompts = 1, len(self._waiting[0].payloads)
        for request in self._waiting[1:MAX_REQUESTS]:
            num_prompts += len(request.payloads)
            if num_prompts > MAX_PROMPTS:
                break
            count += 1
        requests, self._waiting = self._waiting[:count], self._waiting[count:]
        return requests

    def _expire(self) -> None:
        """Fail what has waited for too long, and wake up for the next."""
        loop, self._alarm = asyncio.get_running_loop(), None
        for request in (*self._sent, *self._waiting):
            if request.answer.done():
                continue
            if request.deadline > loop.time():
                self._alarm = loop.call_at(request.deadline, self._expire)
                return
            request.answer.set_exception(DeadlineExceeded(f"Redis took longer than {self.deadline_s:g} s; try again"))
