"""Splits the text of an answer into content and tool calls while it grows, for the formats of `agents/tool_calls.py`.

Text is held back from the place where a call may begin. A call is passed on when it is complete; text that looked like
a call and is none becomes content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.v1 import generate_pb2
from penstock_rollout.agents.tool_calls import TOOL_FORMATS, MalformedCall, ToolCallParser


@dataclass
class ReadText:
    """What new text of an answer turned out to be."""

    content: str = ""
    tool_calls: list[generate_pb2.ToolCallPart] = field(default_factory=list)


class ToolCallReader(Protocol):
    """Reads one answer."""

    def add(self, text: str, token_ids: Sequence[int], is_last: bool) -> ReadText:
        """Add new text with special tokens. `token_ids` are the ids sampled since the last call of `add`."""
        ...


class FormatReader:
    """Reads calls in one of the formats of `rollout.agents.tool_format`."""

    def __init__(self, parse: ToolCallParser) -> None:
        self._parse = parse
        self._find = _OPENERS.get(parse, _at_once)
        self._closer = _CLOSERS.get(parse, "")
        self._num_calls = 0
        self._held = ""
        self._is_after_call = False

    def add(self, text: str, token_ids: Sequence[int], is_last: bool) -> ReadText:
        self._held += text
        read = ReadText()
        while self._closer and (end := self._end_of_call()) is not None:
            self._take(self._held[:end], read)
            self._held = self._held[end:]
        if is_last:
            self._take(self._held, read)
            self._held = ""
        else:
            start = self._find(self._held)
            self._add_content(self._held[:start], read)
            self._held = self._held[start:]
        return read

    def _end_of_call(self) -> int | None:
        """The end of the first complete call in the held text."""
        start = self._find(self._held)
        end = self._held.find(self._closer, start)
        return None if end < 0 else end + len(self._closer)

    def _take(self, text: str, read: ReadText) -> None:
        """Add text that ends with a call, or that is the rest of the answer."""
        calls = self._parse(text)
        if not calls or any(isinstance(call, MalformedCall) for call in calls):
            self._add_content(text, read)
            return
        self._add_content(text[: self._find(text)], read)
        for call in calls:
            assert not isinstance(call, MalformedCall)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            read.tool_calls.append(
                generate_pb2.ToolCallPart(
                    index=self._num_calls, call_id=new_call_id(), name=call.name, arguments=arguments
                )
            )
            self._num_calls += 1
        self._is_after_call = True

    def _add_content(self, text: str, read: ReadText) -> None:
        """White space after a call only separates it from the next one."""
        if not self._is_after_call or text.strip():
            read.content += text


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _possible_start(opener: str) -> Callable[[str], int]:
    """A function that finds the first place of `opener`, or of its beginning at the end of the text."""

    def find(text: str) -> int:
        place = text.find(opener)
        if place >= 0:
            return place
        lengths = (n for n in range(min(len(opener), len(text)), 0, -1) if text.endswith(opener[:n]))
        return len(text) - next(lengths, 0)

    return find


def _json_turn(text: str) -> int:
    """A Llama turn is a call or no call as a whole."""
    started = text.lstrip()
    is_call = started.startswith("{") or started[: len(_PYTHON_TAG)] == _PYTHON_TAG[: len(started)]
    return 0 if is_call else len(text)


def _first_brace(text: str) -> int:
    place = text.find("{")
    return len(text) if place < 0 else place


def _at_once(text: str) -> int:
    """A parser of the user's own gets the whole answer."""
    return 0


_PYTHON_TAG = "<|python_tag|>"
_OPENERS: dict[ToolCallParser, Callable[[str], int]] = {
    TOOL_FORMATS["hermes"]: _possible_start("<tool_call>"),
    TOOL_FORMATS["llama3_json"]: _json_turn,
    TOOL_FORMATS["openai"]: _first_brace,
}
_CLOSERS: dict[ToolCallParser, str] = {TOOL_FORMATS["hermes"]: "</tool_call>"}
