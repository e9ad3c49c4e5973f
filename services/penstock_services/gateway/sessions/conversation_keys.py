"""Keys by which the history of a call finds the call that sampled it.

A harness sends the conversation back as text. Encoding that text again could give other ids than the ones that were
sampled, so the gateway looks for the call after which the conversation stood exactly like this, and continues from the
ids of that call. A key stands for a whole conversation up to some message, and there are two kinds:

    by message   every message is equal: role, content, names, tool calls with their ids
    by text      every message says the same. Ids, the form of a tool call's arguments, white space around a message
                 and, in the model's own messages, other white space and reasoning in <think> tags do not count:
                 clients often omit these or write them in another way

Plain text has one key for each length at which a recorded conversation ends.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

Message = Mapping[str, Any]
"""`role`, `content`, and perhaps `tool_calls`, `tool_call_id`, `name`, as in OpenAI's API."""

_THINKING = re.compile(r"^\s*(<think>)?.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class MessageKeys:
    """Keys of a conversation after each of its messages."""

    by_message: tuple[bytes, ...]
    by_text: tuple[bytes, ...]

    def then(self, answer: Message) -> tuple[bytes, bytes]:
        """Both keys of the conversation with one more message."""
        return _digest(self.by_message[-1] + _exact(answer)), _digest(self.by_text[-1] + _text(answer))


def message_keys(messages: Sequence[Message], context: str = "") -> MessageKeys:
    """`context` is whatever else shapes the prompt, such as the tools. Entry i of the keys is before message i."""
    by_message, by_text = [_digest(b"message " + context.encode())], [_digest(b"text " + context.encode())]
    for message in messages:
        by_message.append(_digest(by_message[-1] + _exact(message)))
        by_text.append(_digest(by_text[-1] + _text(message)))
    return MessageKeys(tuple(by_message), tuple(by_text))


def text_key(text: str) -> bytes:
    return _digest(b"plain " + text.encode())


def text_keys(text: str, lengths: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Length and key of the beginnings of the text that have these numbers of characters, the longest first."""
    hashed, start, found = blake2b(b"plain ", digest_size=16), 0, []
    for length in sorted(length for length in set(lengths) if 0 < length <= len(text)):
        hashed.update(text[start:length].encode())
        start = length
        found.append((length, hashed.digest()))
    return reversed(found)


def _exact(message: Message) -> bytes:
    given = {name: value for name, value in message.items() if value not in (None, "", [])}
    return json.dumps(given, sort_keys=True).encode()


def _text(message: Message) -> bytes:
    """The text of the message, without its form."""
    content = str(message.get("content") or "").strip()
    if message.get("role") == "assistant":  # What others say may be code or YAML, where white space is meant.
        content = " ".join(_THINKING.sub("", content, count=1).split())
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("role"), content, calls], sort_keys=True).encode()


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, parse_float=_number)
    return [function.get("name"), arguments]


def _number(text: str) -> float | int:
    """A number as JavaScript has it, for which 1.0 and 1 are the same."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
