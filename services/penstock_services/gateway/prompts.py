"""Prompts: submission, listing, cancellation, and their results.

`JoinedSubmissions` joins the submissions of many clients: requests that arrive during one exchange with Redis share the
next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import Field

from penstock.api import records
from penstock.api.conversion import check_label
from penstock.cancellation import end_task
from penstock.codec import prompt_to_proto
from penstock.errors import Conflict, DeadlineExceeded, InvalidInput, NotFound, PenstockError, QueueFull, Unavailable
from penstock.replay.queue import RedisReplayQueue, answer_all
from penstock.replay.queue_types import PromptRequest, PromptState, PromptStatus
from penstock.replay.queue_types import Submission as QueueSubmission
from penstock.replay.results import PromptBook, PromptResult, entry_of, entry_order
from penstock.store.ownership import Owner
from penstock.tracing import Tracing
from penstock.trajectory import Prompt
from penstock.v1 import prompts_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.groups import GroupReader, usable_prompts
from penstock_services.gateway.operations import (
    IDEMPOTENCY_KEY,
    Handlers,
    body_digest,
    bounded,
    operation,
    shown_reason,
)

logger = logging.getLogger(__name__)
LONGEST_WAIT_S = 60.0
MAX_PROMPT_IDS = 1000
MAX_PRIORITY = 1000
"""The queue sorts by priority · 1e12 + id as a double, which is exact up to a priority of about 9000."""
_DEFAULT = prompt_to_proto(Prompt())
RECHECK_S = 2.0
"""How often a wait reads the prompt's state even without a result: the prompts of evaluations write none."""
_FINISHED: tuple[PromptState, ...] = ("queued", "trained", "dead_lettered", "cancelled")
_STATES: dict[PromptState, Any] = {
    state: prompts_pb2.PromptRecord.State.Value(state.upper()) for state in get_args(PromptState)
}
_STATE_NAMES = {number: name for name, number in _STATES.items()}
BLOCK_S = 1.0
"""Longest blocking read. When the gateway stops, its streams end within this time."""
ANY_PROMPT = 0
PACE_S = 0.1
"""Pause after each batch, so that a busy run wakes its watchers ten times a second and not for every result."""


class SubmitPrompts(records.Record):
    prompts: tuple[records.SubmittedPrompt, ...]
    idempotency_key: str = ""
    prompt_keys: tuple[str, ...] = ()


class ListPrompts(records.Page):
    state: str = ""
    data_source: str = ""


class CancelPrompts(records.Record):
    prompt_ids: tuple[records.Int64, ...]


class WaitPrompt(records.Record):
    timeout_s: float = 30.0


class WatchResults(records.Record):
    cursor: str = ""
    with_groups: bool = False
    prompt_ids: tuple[records.PromptId, ...] = Field(default=(), alias="prompt_id")


@dataclass
class PromptHandlers(Handlers):
    """Streams and waits read through `watched`, which has its own connections."""

    queue: RedisReplayQueue
    watched: GroupReader
    stopping: asyncio.Event
    tracing: Tracing

    def __post_init__(self) -> None:
        self.book = PromptBook(self.queue.client, self.queue.run)
        self.submissions = JoinedSubmissions(self.queue, self.deadline_s)
        self.feed = ResultFeed(
            PromptBook(self.watched.queue.client, self.watched.queue.run), self.config.redis.timeout_s, self.stopping
        )

    @operation(
        "POST", "prompts", "submit", records.Submission, "StreamPrompts", takes=SubmitPrompts, header=IDEMPOTENCY_KEY,
        keeps_deadline=True,
    )  # fmt: skip
    async def submit_prompts(
        self, caller: Caller, request: prompts_pb2.SubmitPromptsRequest
    ) -> prompts_pb2.SubmitPromptsResponse:
        """Submit prompts: all are accepted, or none."""
        prompts = checked_prompts(request.prompts, self.config.gateway.max_prompts_per_request)
        checks.keys(request.idempotency_key, request.prompt_keys, len(prompts))
        owner = caller.owner.name
        for prompt in prompts:
            prompt.owner = owner
        submit = self._submit_traced if self.tracing.is_on else self._submit
        each = await submit(prompts, request, _digests(prompts, request), owner)
        for number, submission in enumerate(each):
            if submission.replayed and not submission.prompt_ids:
                key = f"prompt_keys[{number}]" if request.prompt_keys else "idempotency_key"
                raise Conflict(f"{key} was used for another request before; choose a new key")
        ids = [prompt_id for submission in each for prompt_id in submission.prompt_ids]
        num_replayed = sum(len(submission.prompt_ids) for submission in each if submission.replayed)
        return prompts_pb2.SubmitPromptsResponse(
            prompt_ids=ids, replayed=num_replayed == len(ids), num_replayed=num_replayed
        )

    async def _submit_traced(self, prompts: Sequence[prompts_pb2.Prompt], *others: Any) -> list[QueueSubmission]:
        with contextlib.ExitStack() as spans:
            for prompt in prompts:
                span = self.tracing.start("submit", prompt.trace_parent, data_source=prompt.data_source)
                prompt.trace_parent = spans.enter_context(span)
            return await self._submit(prompts, *others)

    async def _submit(
        self, prompts: Sequence[prompts_pb2.Prompt], request: prompts_pb2.SubmitPromptsRequest, digests: list[str],
        owner: str,
    ) -> list[QueueSubmission]:  # fmt: skip
        payloads = [prompt.SerializeToString() for prompt in prompts]
        priorities = [prompt.priority for prompt in prompts]
        if not request.prompt_keys:
            whole = PromptRequest(payloads, priorities, request.idempotency_key, owner, *digests)
            return [await self.submissions.submit(whole)]
        rows = zip(payloads, priorities, request.prompt_keys, digests, strict=True)
        each = [PromptRequest([payload], [priority], key, owner, digest) for payload, priority, key, digest in rows]
        return await bounded(self.queue.submit_many(each, all_or_none=True), self.deadline_s)

    @operation("GET", "prompts/{prompt_id}", "read", records.PromptRecord)
    async def get_prompt(self, caller: Caller, request: prompts_pb2.GetPromptRequest) -> prompts_pb2.PromptRecord:
        checks.prompt_id(request.prompt_id)
        return _usable(await self.queue.get_prompt(request.prompt_id), caller.owner)

    @operation("GET", "prompts", "read", records.PromptPage, takes=ListPrompts)
    async def list_prompts(
        self, caller: Caller, request: prompts_pb2.ListPromptsRequest
    ) -> prompts_pb2.ListPromptsResponse:
        """List prompts by id, oldest first."""
        page_size = checks.page_size(request.page_size)
        after = int(checks.page_position("prompts", request.page_token, "[0-9]{1,10}") or 0)
        if request.state and request.state not in _STATE_NAMES:
            raise InvalidInput("state", f"{request.state} is not the number of a state of PromptRecord")
        page = await self.book.page(after, page_size, _STATE_NAMES.get(request.state))
        shown = [record for record in map(_to_proto, page.prompts) if caller.owner.may_use(record.prompt.owner)]
        if request.data_source:
            shown = [record for record in shown if record.prompt.data_source == request.data_source]
        token = checks.page_token("prompts", page.after) if page.has_more else ""
        return prompts_pb2.ListPromptsResponse(prompts=shown, next_page_token=token)

    @operation("POST", "prompts:cancel", "submit", records.CancelledPrompts, takes=CancelPrompts)
    async def cancel_prompts(
        self, caller: Caller, request: prompts_pb2.CancelPromptsRequest
    ) -> prompts_pb2.CancelPromptsResponse:
        """Cancel prompts whose groups the learner has not taken."""
        prompt_ids = checked_prompt_ids(request.prompt_ids)
        if not prompt_ids:
            raise InvalidInput("prompt_ids", "give at least one id")
        usable = await usable_prompts(self.queue, prompt_ids, caller.owner)
        chosen = [prompt_id for prompt_id in prompt_ids if prompt_id in usable]
        found = dict(zip(chosen, await self.book.cancel(chosen), strict=True))
        shown = [
            _to_proto(status) if (status := found.get(prompt_id)) else await self._ended(prompt_id)
            for prompt_id in prompt_ids
        ]
        return prompts_pb2.CancelPromptsResponse(prompts=shown)

    async def _ended(self, prompt_id: int) -> prompts_pb2.PromptRecord:
        """A prompt that has ended keeps only its state, which every key may see. Any other has no state here."""
        with contextlib.suppress(NotFound):
            record = _to_proto(await self.queue.get_prompt(prompt_id))
            if not record.HasField("prompt"):
                return record
        return prompts_pb2.PromptRecord(prompt_id=prompt_id)

    @operation(
        "GET", "prompts/{prompt_id}:wait", "read", records.PromptRecord, takes=WaitPrompt, timeout_s=2 * LONGEST_WAIT_S
    )
    async def wait_prompt(self, caller: Caller, request: prompts_pb2.WaitPromptRequest) -> prompts_pb2.PromptRecord:
        """Wait until the prompt is finished, for up to `timeout_s`, and return its record."""
        checks.prompt_id(request.prompt_id)
        if not 0 <= request.timeout_s <= LONGEST_WAIT_S:
            raise InvalidInput("timeout_s", f"must be between 0 and {LONGEST_WAIT_S:g}; wait again after it")
        deadline = time.monotonic() + request.timeout_s
        async with self.feed.finishing(request.prompt_id) as finished:
            while True:
                finished.clear()
                status = await self.watched.queue.get_prompt(request.prompt_id)
                record = _usable(status, caller.owner)
                remaining_s = deadline - time.monotonic()
                if status.state in _FINISHED or remaining_s <= 0 or self.stopping.is_set():
                    return record
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), min(remaining_s, RECHECK_S))

    @operation(
        "GET", "results", "read", records.Result, takes=WatchResults, header=("last-event-id", "cursor"),
        event=("result", "cursor"),
    )  # fmt: skip
    async def watch_results(
        self, caller: Caller, request: prompts_pb2.WatchResultsRequest
    ) -> AsyncIterator[prompts_pb2.Result]:
        """Send every prompt that finishes. The id of an event is the cursor to resume from."""
        wanted = frozenset(checked_prompt_ids(request.prompt_ids))
        cursor = await self.feed.book.start(request.cursor)
        return self._results(cursor, wanted, caller.owner, request.with_groups)

    async def _results(
        self, cursor: str, wanted: frozenset[int], owner: Owner, with_groups: bool
    ) -> AsyncIterator[prompts_pb2.Result]:
        async for batch in self.feed.follow(cursor):
            shown = [result for result in batch if not wanted or result.prompt_id in wanted]
            groups = await bounded(self._groups(shown, owner), self.deadline_s) if with_groups else {}
            for result in shown:
                yield prompts_pb2.Result(
                    cursor=result.cursor, prompt_id=result.prompt_id, state=_STATES[result.state],
                    reason=shown_reason(result.reason, owner), attempt=result.attempt,
                    group=groups.get(result.prompt_id, b""),
                )  # fmt: skip

    async def _groups(self, results: list[PromptResult], owner: Owner) -> dict[int, bytes]:
        queued = [result.prompt_id for result in results if result.state == "queued"]
        usable = await usable_prompts(self.watched.queue, queued, owner)
        groups = await self.watched.decoded([prompt_id for prompt_id in queued if prompt_id in usable])
        return {group.prompt_id: (await self.watched.with_details(group)).SerializeToString() for group in groups}


def checked_prompts(
    prompts: Sequence[prompts_pb2.Prompt], max_prompts: int, evaluation_id: str = ""
) -> list[prompts_pb2.Prompt]:
    """Return the prompts with absent fields filled in, or raise InvalidInput for the first wrong one.

    A prompt is copied before fields are filled in. A prompt that names an evaluation other than `evaluation_id` is
    refused, because held-out prompts must never be trained."""
    if not prompts:
        raise InvalidInput("prompts", "give at least one prompt")
    if len(prompts) > max_prompts:
        raise InvalidInput("prompts", f"a request may have {max_prompts}, not {len(prompts)}; split it")
    checked = []
    for index, prompt in enumerate(prompts):
        ground_truth, extra_info = prompt.ground_truth_json, prompt.extra_info_json
        is_complete = ground_truth and extra_info and prompt.HasField("sampling")
        complete = prompt if is_complete else _with_defaults(prompt)
        try:
            _check_prompt(complete, evaluation_id)
            if ground_truth:
                checks.json_value(ground_truth, "ground_truth_json")
            if extra_info and not isinstance(checks.json_value(extra_info, "extra_info_json"), dict):
                raise InvalidInput("extra_info_json", "must be a JSON object")
        except InvalidInput as error:
            raise error.under(f"prompts[{index}]") from error
        if evaluation_id:
            if complete is prompt:
                complete = _with_defaults(prompt)
            complete.evaluation_id = evaluation_id
        checked.append(complete)
    return checked


def _with_defaults(prompt: prompts_pb2.Prompt) -> prompts_pb2.Prompt:
    complete = prompts_pb2.Prompt()
    complete.CopyFrom(prompt)
    if not complete.HasField("sampling"):
        complete.sampling.CopyFrom(_DEFAULT.sampling)
    complete.ground_truth_json = complete.ground_truth_json or _DEFAULT.ground_truth_json
    complete.extra_info_json = complete.extra_info_json or _DEFAULT.extra_info_json
    return complete


def _check_prompt(prompt: prompts_pb2.Prompt, evaluation_id: str) -> None:
    messages, token_ids = prompt.messages, prompt.token_ids
    if bool(messages) == bool(token_ids):
        raise InvalidInput("", "give exactly one of messages and token_ids")
    checks.messages(messages)
    if token_ids:
        checks.token_ids(token_ids)
    if not 1 <= prompt.num_samples <= checks.MAX_NUM_SAMPLES:
        raise InvalidInput("num_samples", f"must be between 1 and {checks.MAX_NUM_SAMPLES}, not {prompt.num_samples}")
    if not -MAX_PRIORITY <= prompt.priority <= MAX_PRIORITY:
        raise InvalidInput("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    check_label(prompt.data_source, "data_source")
    check_label(prompt.agent_name, "agent_name")
    checks.sampling(prompt.sampling)
    if prompt.evaluation_id not in ("", evaluation_id):
        raise InvalidInput("evaluation_id", "leave it empty; create an evaluation for held-out prompts")


def checked_prompt_ids(prompt_ids: Sequence[int]) -> list[int]:
    if len(prompt_ids) > MAX_PROMPT_IDS:
        raise InvalidInput("prompt_ids", f"a request may have {MAX_PROMPT_IDS}, not {len(prompt_ids)}; split it")
    for index, prompt_id in enumerate(prompt_ids):
        if not 1 <= prompt_id <= checks.MAX_PROMPT_ID:
            raise InvalidInput(f"prompt_ids[{index}]", f"must be between 1 and {checks.MAX_PROMPT_ID}")
    return list(prompt_ids)


def digest_of(prompts: Sequence[prompts_pb2.Prompt]) -> str:
    """Digest of what the prompts ask for. How a try is traced does not count."""
    bodies = [prompts_pb2.Prompt.FromString(p.SerializeToString()) if p.trace_parent else p for p in prompts]
    for body in bodies:
        body.ClearField("trace_parent")
    return body_digest(bodies)


def _digests(prompts: Sequence[prompts_pb2.Prompt], request: prompts_pb2.SubmitPromptsRequest) -> list[str]:
    """One digest for each key of the request."""
    if request.prompt_keys:
        return [digest_of([prompt]) for prompt in prompts]
    return [digest_of(prompts)] if request.idempotency_key else []


def _to_proto(status: PromptStatus) -> prompts_pb2.PromptRecord:
    record = prompts_pb2.PromptRecord(prompt_id=status.prompt_id, state=_STATES[status.state], attempt=status.attempt)
    if status.payload:
        record.prompt.ParseFromString(status.payload)
    return record


def _usable(status: PromptStatus, owner: Owner) -> prompts_pb2.PromptRecord:
    record = _to_proto(status)
    if not owner.may_use(record.prompt.owner):
        raise NotFound(f"prompt {status.prompt_id} does not exist, or was discarded")
    return record


class ResultFeed:
    """Wakes callers that wait for results of one run.

    A single task reads the stream of results while anyone waits, so any number of watchers hold one Redis connection.
    The task only wakes them: each watcher reads from its own cursor, and misses nothing when it is slow."""

    def __init__(self, book: PromptBook, redis_timeout_s: float, stopping: asyncio.Event) -> None:
        self.book = book
        self.deadline_s = 2 * redis_timeout_s
        self.block_s = min(BLOCK_S, redis_timeout_s / 2)
        self.stopping = stopping
        self._waits: dict[int, set[asyncio.Event]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._position = ""
        """The last entry that the reader has seen."""

    async def follow(self, cursor: str) -> AsyncIterator[list[PromptResult]]:
        """Yield all results after `cursor`, in order and each once, until the gateway stops."""
        while not self.stopping.is_set():
            found = await bounded(self.book.after(cursor), self.deadline_s)
            if found:
                cursor = found[-1].cursor
                yield found
            else:
                await self._wait_for_entry_after(entry_of(cursor))

    @contextlib.asynccontextmanager
    async def finishing(self, prompt_id: int) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever a result of the prompt is written, and when the gateway stops.

        Read the prompt's state within the block: a result that is written after that read sets the event."""
        with self._event(prompt_id) as event:
            if self._reader is None:
                self._start_reader(await bounded(self.book.newest_entry(), self.deadline_s))
            yield event

    async def close(self) -> None:
        if self._reader is not None:
            await end_task(self._reader)

    @contextlib.contextmanager
    def _event(self, prompt_id: int) -> Iterator[asyncio.Event]:
        """An event that the reader sets for a result of the prompt, or of ANY_PROMPT."""
        event = asyncio.Event()
        self._waits.setdefault(prompt_id, set()).add(event)
        try:
            yield event
        finally:
            self._waits[prompt_id].discard(event)
            if not self._waits[prompt_id]:
                del self._waits[prompt_id]

    async def _wait_for_entry_after(self, entry: str) -> None:
        self._start_reader(entry)
        if entry_order(self._position) > entry_order(entry):
            return  # The reader saw it between the watcher's read and this call.
        with self._event(ANY_PROMPT) as event:
            await event.wait()

    def _start_reader(self, entry: str) -> None:
        if self._reader is None:
            self._position = entry
            self._reader = asyncio.create_task(self._read(), name="results")

    async def _read(self) -> None:
        try:
            while not self.stopping.is_set():
                found = await self.book.wait_for_results(self._position, self.block_s)
                if found:
                    self._position = entry_of(found[-1].cursor)
                    for prompt_id in {ANY_PROMPT, *(result.prompt_id for result in found)}:
                        for event in self._waits.get(prompt_id, ()):
                            event.set()
                    await asyncio.sleep(PACE_S)
                if not self._waits:
                    return
        except PenstockError as error:
            # The watchers read again after this pause, and each reports the error to its own client.
            logger.warning("cannot wait for results: %s", error)
            await asyncio.sleep(self.block_s)
        finally:
            self._reader = None
            for event in set().union(*self._waits.values()):
                event.set()


# ── submissions of many clients in one exchange with Redis ──

MAX_PROMPTS = 2_048
"""Maximum number of prompts in one exchange, because Redis answers no other client meanwhile."""
MAX_REQUESTS = 32
"""Maximum number of requests in one exchange, so that some clients are answered while Redis works on the next one."""
LINGER_S = 0.001
MAX_LINGERS = 4
"""An exchange costs more than the requests in it. If earlier exchanges held several requests, the next one waits for
more: LINGER_S at a time, while more arrive, until it has the usual number."""
DECAY = 7 / 8
"""Factor by which the usual number shrinks with every exchange."""
FULL_BATCH_PROMPTS = 256
"""An exchange that has this many prompts is sent without waiting for more."""


@dataclass(slots=True)
class _Waiting:
    request: PromptRequest
    answer: asyncio.Future[QueueSubmission]
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

    async def submit(self, request: PromptRequest) -> QueueSubmission:
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
            self._usual_count = max(self._count, self._usual_count * DECAY)
            requests = [sent.request for sent in self._sent]
            await answer_all([sent.answer for sent in self._sent], self._exchange(requests))
            self._sent = []

    async def _exchange(self, requests: Sequence[PromptRequest]) -> list[QueueSubmission | Exception]:
        try:
            return [*await self.queue.submit_many(requests)]
        except Exception as error:
            if len(requests) == 1 or isinstance(error, (Unavailable, QueueFull)):  # each request would fail alike
                return [error] * len(requests)
            return [answer for request in requests for answer in await self._exchange([request])]

    async def _linger(self) -> None:
        """Wait for more requests, but not after a full exchange: what arrived meanwhile has waited already."""
        if self._usual_count < 1.5 or self._count >= MAX_REQUESTS:
            return
        for _ in range(MAX_LINGERS):
            count = len(self._waiting)
            num_prompts = sum(len(waiting.request.payloads) for waiting in self._waiting)
            if count >= self._usual_count or num_prompts >= FULL_BATCH_PROMPTS:
                return
            await asyncio.sleep(LINGER_S)
            if len(self._waiting) == count:
                return

    def _next(self) -> list[_Waiting]:
        """The first waiting request, and the next ones that fit into the same exchange."""
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
