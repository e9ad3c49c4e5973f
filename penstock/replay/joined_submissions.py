"""Joins the submissions of many clients: requests that arrive during one exchange with Redis share the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import DeadlineExceeded, QueueFull, Unavailable
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import PromptRequest, Submission

T = TypeVar("T")
MAX_PROMPTS = 2_048
"""Maximum number of prompts in one exchange, because Redis answers no other client meanwhile."""
MAX_REQUESTS = 32
"""Maximum number of requests in one exchange, so that some clients are answered while Redis works on the next one."""
LINGER_S = 0.001
MAX_LINGERS = 4
"""An exchange costs more than the requests in it. If earlier exchanges held several requests, the next one waits for
more: LINGER_S at a time, while more arrive, until it has the usual number."""
FADE = 7 / 8
"""Factor by which the usual number shrinks with every exchange."""
ENOUGH_PROMPTS = 256
"""An exchange that has this many prompts is sent without waiting for more."""


async def answer_all(waiting: Sequence[asyncio.Future[T]], exchange: Awaitable[Sequence[T | Exception]]) -> None:
    """Give each caller that still waits its answer, or its error, or the error with which the exchange failed."""
    try:
        answers = await exchange
    except Exception as error:
        for future in waiting:
            if not future.done():
                future.set_exception(error)
    else:
        for future, answer in zip(waiting, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


@dataclass(slots=True)
class _Waiting:
    request: PromptRequest
    answer: asyncio.Future[Submission]
    deadline: float


class JoinedSubmissions:
    """Runs one exchange at a time, in the order of arrival. Each request is accepted whole or not at all, as if it were
    alone: if Redis refuses an exchange, which then has stored nothing, its requests are sent one by one. A request that
    has no answer after `deadline_s` fails with DeadlineExceeded; it may still have been accepted."""

    def __init__(self, queue: RedisReplayQueue, deadline_s: float) -> None:
        self.queue = queue
        self.deadline_s = deadline_s
        self._waiting: list[_Waiting] = []
        self._sent: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        """One timer for all requests, because their deadlines are in the order of their arrival."""
        self._count = 0
        self._usual_count = 1.0
        """Number of requests in the last exchange (`_count`) and in the fullest recent one."""

    async def submit(self, request: PromptRequest) -> Submission:
        """`PromptIntake.submit_many`, joined with others. Cancelling the caller does not withdraw the request."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future(), loop.time() + self.deadline_s)
        self._waiting.append(waiting)
        if self._alarm is None:
            self._alarm = loop.call_at(waiting.deadline, self._expire)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await waiting.answer

    async def _send(self) -> None:
        while self._waiting:
            await self._linger()
            self._sent = self._next()
            self._count = len(self._sent)
            self._usual_count = max(self._count, self._usual_count * FADE)
            requests = [sent.request for sent in self._sent]
            await answer_all([sent.answer for sent in self._sent], self._exchange(requests))
            self._sent = []

    async def _exchange(self, requests: Sequence[PromptRequest]) -> list[Submission | Exception]:
        try:
            return [*await self.queue.submit_many(requests)]
        except (Unavailable, QueueFull):  # each request would fail alike
            raise
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in await self._exchange([request])]

    async def _linger(self) -> None:
        """Wait for more requests, but not after a full exchange: those that arrived meanwhile waited already."""
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
        return sum(len(waiting.request.payloads) for waiting in self._waiting)

    def _next(self) -> list[_Waiting]:
        """The first waiting request, and those after it that fit into the same exchange."""
        count, num_prompts = 1, len(self._waiting[0].request.payloads)
        for waiting in self._waiting[1:MAX_REQUESTS]:
            num_prompts += len(waiting.request.payloads)
            if num_prompts > MAX_PROMPTS:
                break
            count += 1
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        return chosen

    def _expire(self) -> None:
        """Fail the requests whose deadline has passed, and set the timer for the next one."""
        loop, self._alarm = asyncio.get_running_loop(), None
        for waiting in (*self._sent, *self._waiting):
            if waiting.answer.done():
                continue
            if waiting.deadline > loop.time():
                self._alarm = loop.call_at(waiting.deadline, self._expire)
                return
            waiting.answer.set_exception(DeadlineExceeded(f"Redis took longer than {self.deadline_s:g} s; try again"))
