"""Prompts: submission, listing, cancellation, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, NotFound
from penstock.replay.joined_submissions import JoinedSubmissions
from penstock.replay.queue_types import PromptState, PromptStatus, Submission
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.replay.results import PromptBook, PromptResult
from penstock.tracing import Tracing
from penstock.v1 import prompts_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, bounded, operation
from penstock_services.gateway.prompts.groups import GroupReader
from penstock_services.gateway.prompts.result_feed import ResultFeed

LONGEST_WAIT_S = 60.0
MAX_CANCELLED = 1000
RECHECK_S = 2.0
"""How often a wait reads the prompt's state even without a result: the prompts of evaluations write none."""
_FINISHED: tuple[PromptState, ...] = ("queued", "trained", "dead_lettered", "cancelled")
_STATES: dict[PromptState, prompts_pb2.PromptRecord.State] = {
    "pending": prompts_pb2.PromptRecord.PENDING,
    "leased": prompts_pb2.PromptRecord.LEASED,
    "queued": prompts_pb2.PromptRecord.QUEUED,
    "trained": prompts_pb2.PromptRecord.TRAINED,
    "dead_lettered": prompts_pb2.PromptRecord.DEAD_LETTERED,
    "cancelled": prompts_pb2.PromptRecord.CANCELLED,
}
_STATE_NAMES = {number: name for name, number in _STATES.items()}


class PromptHandlers:
    """Streams and waits read through `watched`, which has connections of its own."""

    def __init__(
        self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue, watched: GroupReader,
        stopping: asyncio.Event, tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.queue = queue
        self.watched = watched
        self.stopping = stopping
        self.tracing = tracing or Tracing()
        self.book = PromptBook(queue)
        self.submissions = JoinedSubmissions(queue, 2 * config.redis.timeout_s)
        self.watched_book = PromptBook(watched.queue)
        self.feed = ResultFeed(self.watched_book, config.redis.timeout_s, stopping)

    @operation("submit", keeps_deadline=True)
    async def submit_prompts(self, request: prompts_pb2.SubmitPromptsRequest) -> prompts_pb2.SubmitPromptsResponse:
        validation.check_idempotency_key(request.idempotency_key)
        prompts = validation.checked_prompts(request.prompts, self.config.gateway.max_prompts_per_request)
        validation.check_prompt_keys(request.prompt_keys, len(prompts), request.idempotency_key)
        submit = self._submit_traced if self.tracing.is_on else self._submit
        submission = await submit(prompts, request)
        if len(submission.prompt_ids) != len(prompts):
            raise InvalidInput(
                "idempotency_key",
                f"was used for another request, of {len(submission.prompt_ids)} prompts; choose a new key",
            )
        num_replayed = len(prompts) if submission.replayed else submission.num_replayed
        return prompts_pb2.SubmitPromptsResponse(
            prompt_ids=submission.prompt_ids, replayed=submission.replayed, num_replayed=num_replayed
        )

    async def _submit_traced(
        self, prompts: Sequence[prompts_pb2.Prompt], request: prompts_pb2.SubmitPromptsRequest
    ) -> Submission:
        with contextlib.ExitStack() as spans:
            for prompt in prompts:
                span = self.tracing.start("submit", prompt.trace_parent, data_source=prompt.data_source)
                prompt.trace_parent = spans.enter_context(span)
            return await self._submit(prompts, request)

    async def _submit(
        self, prompts: Sequence[prompts_pb2.Prompt], request: prompts_pb2.SubmitPromptsRequest
    ) -> Submission:
        payloads = [prompt.SerializeToString() for prompt in prompts]
        priorities = [prompt.priority for prompt in prompts]
        if not request.prompt_keys:
            return await self.submissions.submit(payloads, priorities, request.idempotency_key)
        rows = zip(payloads, priorities, request.prompt_keys, strict=True)
        requests = [([payload], [priority], key) for payload, priority, key in rows]
        each = await self.queue.submit_many(requests, all_or_none=True)
        for index, submission in enumerate(each):
            if submission.replayed and len(submission.prompt_ids) != 1:
                raise InvalidInput(
                    f"prompt_keys[{index}]",
                    f"was used for a request of {len(submission.prompt_ids)} prompts; choose a new key",
                )
        num_replayed = sum(submission.replayed for submission in each)
        ids = tuple(submission.prompt_ids[0] for submission in each)
        return Submission(ids, num_replayed == len(ids), num_replayed)

    @operation("read")
    async def get_prompt(self, request: prompts_pb2.GetPromptRequest) -> prompts_pb2.PromptRecord:
        _check_prompt_id(request.prompt_id)
        return _to_proto(await self.queue.get_prompt(request.prompt_id))

    @operation("read")
    async def list_prompts(self, request: prompts_pb2.ListPromptsRequest) -> prompts_pb2.ListPromptsResponse:
        page_size = validation.checked_page_size(request.page_size)
        after = int(validation.decode_page_token("prompts", request.page_token, "[0-9]{1,10}") or 0)
        if request.state and request.state not in _STATE_NAMES:
            raise InvalidInput("state", f"{request.state} is not the number of a state of PromptRecord")
        page = await self.book.page(after, page_size, _STATE_NAMES.get(request.state))
        records = [_to_proto(status) for status in page.prompts]
        if request.data_source:
            records = [record for record in records if record.prompt.data_source == request.data_source]
        token = validation.encode_page_token("prompts", page.after) if page.has_more else ""
        return prompts_pb2.ListPromptsResponse(prompts=records, next_page_token=token)

    @operation("submit")
    async def cancel_prompts(self, request: prompts_pb2.CancelPromptsRequest) -> prompts_pb2.CancelPromptsResponse:
        prompt_ids = validation.checked_prompt_ids(request.prompt_ids, MAX_CANCELLED)
        if not prompt_ids:
            raise InvalidInput("prompt_ids", "give at least one id")
        found = await self.book.cancel(prompt_ids)
        records = [
            _to_proto(status) if status else prompts_pb2.PromptRecord(prompt_id=prompt_id)
            for prompt_id, status in zip(prompt_ids, found, strict=True)
        ]
        return prompts_pb2.CancelPromptsResponse(prompts=records)

    @operation("read", timeout_s=2 * LONGEST_WAIT_S)
    async def wait_prompt(self, request: prompts_pb2.WaitPromptRequest) -> prompts_pb2.PromptRecord:
        _check_prompt_id(request.prompt_id)
        if not 0 <= request.timeout_s <= LONGEST_WAIT_S:
            raise InvalidInput("timeout_s", f"must be between 0 and {LONGEST_WAIT_S:g}; wait again after it")
        deadline = time.monotonic() + request.timeout_s
        async with self.feed.finishing(request.prompt_id) as finished:
            while True:
                finished.clear()
                status = await self.watched.queue.get_prompt(request.prompt_id)
                remaining_s = deadline - time.monotonic()
                if status.state in _FINISHED or remaining_s <= 0 or self.stopping.is_set():
                    return _to_proto(status)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), min(remaining_s, RECHECK_S))

    @operation("read")
    async def watch_results(self, request: prompts_pb2.WatchResultsRequest) -> AsyncIterator[prompts_pb2.Result]:
        wanted = frozenset(validation.checked_prompt_ids(request.prompt_ids, MAX_CANCELLED))
        cursor = await self.watched_book.start(request.cursor)
        return self._results(cursor, wanted, request.with_groups)

    async def _results(
        self, cursor: str, wanted: frozenset[int], with_groups: bool
    ) -> AsyncIterator[prompts_pb2.Result]:
        async for batch in self.feed.follow(cursor):
            shown = [result for result in batch if not wanted or result.prompt_id in wanted]
            groups = await bounded(self._groups(shown), 2 * self.config.redis.timeout_s) if with_groups else {}
            for result in shown:
                yield prompts_pb2.Result(
                    cursor=result.cursor, prompt_id=result.prompt_id, state=_STATES[result.state],
                    reason=result.reason, attempt=result.attempt, group=groups.get(result.prompt_id, b""),
                )  # fmt: skip

    async def _groups(self, results: list[PromptResult]) -> dict[int, bytes]:
        groups = await self.watched.decoded([result.prompt_id for result in results if result.state == "queued"])
        return {group.prompt_id: (await self.watched.with_details(group)).SerializeToString() for group in groups}


def _to_proto(status: PromptStatus) -> prompts_pb2.PromptRecord:
    record = prompts_pb2.PromptRecord(prompt_id=status.prompt_id, state=_STATES[status.state], attempt=status.attempt)
    if status.payload:
        record.prompt.ParseFromString(status.payload)
    return record


def _check_prompt_id(prompt_id: int) -> None:
    if not 1 <= prompt_id <= validation.MAX_PROMPT_ID:
        raise NotFound(f"prompt {prompt_id} does not exist")
