"""An answer on its way to the client, the same for all protocols: its choices, their order, and the forms of errors."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np

from penstock.errors import InvalidInput, PenstockError, PromptTooLong, QueueFull, RateLimited, Unauthenticated
from penstock.protocols.conversation import AnswerMessage, Json
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


class Choice(AnswerMessage):
    """One sample of an answer, collected chunk by chunk."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: set[int] = set()
        self.num_before = 0
        """Number of tokens before the newest chunk."""
        self.num_prompt_tokens = 0
        self.finish_reason = groups_pb2.Trajectory.FINISH_REASON_UNSPECIFIED
        self.stop_text = ""

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        super().add(chunk)
        self.num_before = len(self.token_ids)
        self.token_ids += np.frombuffer(chunk.token_ids, dtype="<i4").tolist()
        self.log_probs += np.frombuffer(chunk.log_probs, dtype="<f4").tolist()
        self.versions |= {segment.policy_version for segment in chunk.segments}
        self.num_prompt_tokens = self.num_prompt_tokens or len(chunk.prompt_token_ids) // 4
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_text = chunk.stop_text or self.stop_text

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens ended it."""
        return self.finish_reason == groups_pb2.Trajectory.LENGTH

    @property
    def ending(self) -> Literal["length", "tool_calls", "stop_text", "stop"] | None:
        """What ended it; None while it goes on."""
        if not self.finish_reason:
            return None
        if self.is_cut:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop_text" if self.stop_text else "stop"


class Exchange:
    """The answer to one request in a protocol. It is used once. Methods that return texts return server-sent events."""

    id_prefix = ""
    own_names: ClassVar[dict[str, str]] = {}
    """The protocol's names of fields that a rollout server refuses under other names, beyond those of all protocols."""

    def __init__(self, body: Any, texts: TokenTexts) -> None:
        self.body = body
        self.texts = texts
        self.answer_id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.field_names = {"tools_json": "tools", "template_arguments_json": "chat_template_kwargs"} | self.own_names

    def whole(self, choices: list[Choice]) -> Json:
        """The answer to a request that is not streamed."""
        raise NotImplementedError

    def begin(self, choice: Choice) -> list[str]:
        """Before everything else. The first chunk has arrived, and `choice` has it."""
        return []

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        """For a chunk, which `choice` has already."""
        raise NotImplementedError

    def end(self, choices: list[Choice]) -> list[str]:
        """After the last chunk."""
        raise NotImplementedError

    def failed(self, error: PenstockError) -> list[str]:
        """For an error in the middle of an answer."""
        raise NotImplementedError


@dataclass
class Item:
    """A text, or a call of a tool, in an answer."""

    call_id: str = ""
    """Empty for a text."""
    name: str = ""
    text: str = ""
    """The text, or the arguments of the call."""
    index: int = 0
    status: str = "completed"
    item_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    log_probs: list[Json] = field(default_factory=list)


class ItemExchange(Exchange):
    """An answer that is a list of items: its text, if it has any, and then its calls. In a stream an item begins, grows
    and ends before the next one begins; `item_events` renders each of these steps."""

    def __init__(self, body: Any, texts: TokenTexts) -> None:
        super().__init__(body, texts)
        self.items: list[Item] = []
        """Items that were begun; the last one may still grow."""
        self._is_open = False

    def item_events(self, step: Literal["begin", "grow", "end"], item: Item, text: str, choice: Choice) -> list[str]:
        """`text` is what the item has grown by."""
        raise NotImplementedError

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        events: list[str] = []
        if chunk.text and not (self._is_open and not self.items[-1].call_id):
            events += self._begin(Item(), choice)
        events += self._grow(chunk.text, choice)
        for part in chunk.tool_calls:
            if part.call_id:
                events += self._begin(Item(part.call_id, part.name), choice)
            events += self._grow(part.arguments, choice)
        return events

    def end(self, choices: list[Choice]) -> list[str]:
        [choice] = choices
        events = [] if self.items else self._begin(Item(), choice)
        return events + self._end(choice, "incomplete" if choice.is_cut else "completed")

    def _begin(self, item: Item, choice: Choice) -> list[str]:
        ended = self._end(choice, "completed")
        item.index, item.status, self._is_open = len(self.items), "in_progress", True
        self.items.append(item)
        return ended + self.item_events("begin", item, "", choice)

    def _grow(self, text: str, choice: Choice) -> list[str]:
        if not text:
            return []
        self.items[-1].text += text
        return self.item_events("grow", self.items[-1], text, choice)

    def _end(self, choice: Choice, status: str) -> list[str]:
        if not self._is_open:
            return []
        self._is_open, self.items[-1].status = False, status
        return self.item_events("end", self.items[-1], "", choice)


def whole_items(choice: Choice) -> list[Item]:
    """The items of an answer that is not streamed."""
    message = choice.message
    texts = [Item(text=message.content)] if message.content or not message.tool_calls else []
    return texts + [Item(call.call_id, call.name, call.arguments) for call in message.tool_calls]


def renamed(error: InvalidInput, exchange: Exchange) -> InvalidInput:
    """The error with the name that its field has in the protocol."""
    field = error.field.removeprefix("sampling.")
    return type(error)(exchange.field_names.get(field, field), error.message)


async def collect(streams: Sequence[Chunks]) -> list[Choice]:
    """Read all answers to their ends, at the same time."""
    choices = [Choice(index) for index in range(len(streams))]
    async with aclosing(merge(streams)) as merged:
        async for number, chunk in merged:
            choices[number].add(chunk)
    return choices


async def collect_unless_left(streams: Sequence[Chunks], receive: Receive) -> list[Choice] | None:
    """The same, but None if the client closes its connection before. Then all answers are aborted, because no one reads
    them: a client that has waited for too long asks again. `receive` is ASGI's, after the request's body."""

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
                for event in (*exchange.begin(choices[index]), *exchange.part(choices[index], first)):
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


def sse(content: Json, kind: str = "") -> str:
    """A server-sent event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(content)}\n\n"


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
