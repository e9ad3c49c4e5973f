"""An answer on its way to the client, the same for all protocols: its choices, their order, and the forms of errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import numpy as np

from penstock.errors import InvalidInput, PenstockError, PromptTooLong, QueueFull, RateLimited, Unauthenticated
from penstock.protocols.conversation import AnswerMessage, Json, Message
from penstock.v1 import generate_pb2, groups_pb2

Chunks = AsyncIterator[generate_pb2.GenerateChunk]
TokenTexts = Callable[[Sequence[int]], list[str]]
"""The text of each token."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that no one reads, in metrics and logs."""
QUEUED_CHUNKS = 64
"""How many chunks of an answer may wait for a client that reads slowly."""
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {
    PromptTooLong.reason: "context_length_exceeded",
    Unauthenticated.reason: "invalid_api_key",
    RateLimited.reason: "rate_limit_exceeded",
}
"""OpenAI's codes by our reasons, where OpenAI has one. Other errors have the reason in lower case as their code."""
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

RETRY_REASONS = frozenset({RateLimited.reason, QueueFull.reason})
"""Reasons below 500 that pass by themselves."""


class Choice:
    """One sample of an answer, collected chunk by chunk."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: set[int] = set()
        self.num_prompt_tokens = 0
        self.finish_reason = groups_pb2.Trajectory.FINISH_REASON_UNSPECIFIED
        self.stop_text = ""
        self._answer = AnswerMessage()

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        self._answer.add(chunk)
        self.token_ids += np.frombuffer(chunk.token_ids, dtype="<i4").tolist()
        self.log_probs += np.frombuffer(chunk.log_probs, dtype="<f4").tolist()
        self.versions |= {segment.policy_version for segment in chunk.segments}
        self.num_prompt_tokens = self.num_prompt_tokens or len(chunk.prompt_token_ids) // 4
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_text = chunk.stop_text or self.stop_text

    @property
    def message(self) -> Message:
        return self._answer.message

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens ended it."""
        return self.finish_reason == groups_pb2.Trajectory.LENGTH


class Exchange(Protocol):
    """One request and its answer in a protocol. It is used once."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """The protocol's names of fields that a rollout server refuses under other names."""
        ...

    def requests(self) -> list[generate_pb2.GenerateRequest]:
        """A generate request for each choice. Raises InvalidInput for what cannot be honoured."""
        ...

    def whole(self, choices: list[Choice]) -> Json:
        """The answer to a request that is not streamed."""
        ...

    def begin(self, choice: Choice) -> list[str]:
        """Events before everything else. The first chunk has arrived, and `choice` has it."""
        ...

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        """Events for a chunk, which `choice` has already."""
        ...

    def end(self, choices: list[Choice]) -> list[str]:
        """Events after the last chunk."""
        ...

    def failed(self, error: PenstockError) -> list[str]:
        """Events for an error in the middle of an answer."""
        ...


def renamed(error: InvalidInput, exchange: Exchange) -> InvalidInput:
    """The error with the name that its field has in the protocol."""
    field = error.field.removeprefix("sampling.")
    return type(error)(exchange.field_names.get(field, field), error.message)


async def collect(streams: Sequence[Chunks]) -> list[Choice]:
    """Read all answers to their ends, at the same time."""
    choices = [Choice(index) for index in range(len(streams))]

    async def read(choice: Choice, stream: Chunks) -> None:
        async with aclosing(cast(Any, stream)) as chunks:
            async for chunk in chunks:
                choice.add(chunk)

    readers = [asyncio.ensure_future(read(*pair)) for pair in zip(choices, streams, strict=True)]
    try:
        await asyncio.gather(*readers)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return choices


async def collect_unless_left(streams: Sequence[Chunks], receive: Receive) -> list[Choice] | None:
    """The same, but None if the client closes its connection before. Then all answers are aborted, because no one reads
    them: a client that has waited for too long asks again. `receive` is that of ASGI, after the request's body."""

    async def wait_until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    reading, leaving = asyncio.ensure_future(collect(streams)), asyncio.ensure_future(wait_until_left())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)


async def open_events(exchange: Exchange, streams: Sequence[Chunks]) -> AsyncIterator[str]:
    """The events of a streamed answer. Waits for the first chunk, so that a refusal has its own status."""
    choices = [Choice(index) for index in range(len(streams))]
    merged = merge(streams)
    try:
        index, first = await anext(merged)
    except BaseException:
        await merged.aclose()
        raise
    choices[index].add(first)

    async def events() -> AsyncIterator[str]:
        async with aclosing(merged):
            try:
                for event in exchange.begin(choices[index]):
                    yield event
                for event in exchange.part(choices[index], first):
                    yield event
                async for number, chunk in merged:
                    choices[number].add(chunk)
                    for event in exchange.part(choices[number], chunk):
                        yield event
                for event in exchange.end(choices):
                    yield event
            except PenstockError as error:
                for event in exchange.failed(error):
                    yield event

    return events()


async def merge(streams: Sequence[Chunks]) -> AsyncGenerator[tuple[int, generate_pb2.GenerateChunk]]:
    """The chunks of all streams with the number of their stream, as they come. Closing it closes all streams."""
    arrived: asyncio.Queue[tuple[int, generate_pb2.GenerateChunk | Exception | None]] = asyncio.Queue(QUEUED_CHUNKS)

    async def read(number: int, stream: Chunks) -> None:
        end: Exception | None = None
        try:
            async with aclosing(cast(Any, stream)) as chunks:
                async for chunk in chunks:
                    await arrived.put((number, chunk))
        except Exception as error:  # raised again by the reader of the queue
            end = error
        await arrived.put((number, end))

    readers = [asyncio.ensure_future(read(*pair)) for pair in enumerate(streams)]
    try:
        num_running = len(streams)
        while num_running:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield number, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def version_fields(choices: Sequence[Choice]) -> Json:
    """`policy_version` is the newest version that sampled a token of the choices."""
    versions = sorted(set().union(*(choice.versions for choice in choices)))
    return {"policy_version": versions[-1] if versions else None, "policy_versions": versions}


def usage_of(choices: Sequence[Choice]) -> Json:
    prompt, completion = choices[0].num_prompt_tokens, sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def now_s() -> int:
    return int(time.time())


def retry_advice(error: PenstockError) -> dict[str, str]:
    """A header that keeps OpenAI's and Anthropic's clients from making the same call again, where that cannot help.
    By themselves they also repeat a 409, which a session that is closed answers forever."""
    is_final = error.http_status < 500 and error.reason not in RETRY_REASONS
    return {"x-should-retry": "false"} if is_final else {}


def openai_error(error: PenstockError) -> Json:
    return openai_fields(error.http_status, error.reason, str(error), getattr(error, "field", ""))


def openai_fields(status: int, reason: str, detail: str, field: str) -> Json:
    """The member `error` of an answer, in which OpenAI's clients look for the message, the type and the code."""
    return {
        "message": detail,
        "type": _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": field or None,
        "code": _OPENAI_CODES.get(reason, reason.lower()),
    }


def anthropic_fields(status: int, detail: str) -> Json:
    """An error of /v1/messages as a whole. The message begins with the name of the wrong field."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail}}
