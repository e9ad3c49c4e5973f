"""How the tool calls of a server's answers are read and constrained: by vLLM's own parsers, or by our tool formats.

A reader splits the text of an answer into content and tool calls while it grows. Text is held back from the place where
a call may begin. A call is passed on when it is complete; text that looked like a call and is not one becomes content.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.config.rollout import RolloutConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.protocols.conversation import Conversation
from penstock.user_code import hint_for_name
from penstock.v1 import generate_pb2
from penstock_rollout.agents.tool_calls import TOOL_FORMATS, MalformedCall, ToolCallParser, find_parser
from penstock_rollout.engines.engine import OutputConstraint
from penstock_rollout.serving.output_constraint import SYNTAXES, calls_are_constrained, constraint_of
from penstock_rollout.tokenization import Tokenization


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


_CHOICES = {
    generate_pb2.TOOL_CHOICE_UNSPECIFIED: "auto",
    generate_pb2.TOOL_CHOICE_NONE: "none",
    generate_pb2.TOOL_CHOICE_REQUIRED: "required",
}


def parser_names() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    names: list[str] = ToolParserManager.list_registered()
    return names


class VllmToolReader:
    """Reads one answer with a tool parser of vLLM."""

    def __init__(self, name: str, tokenizer: Any, conversation: Conversation, *, stream: bool) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        kind = ToolParserManager.get_tool_parser(name)
        self._request = ChatCompletionRequest(
            model="", messages=[], tools=list(conversation.tools), tool_choice=_tool_choice(conversation),
            parallel_tool_calls=not conversation.single_tool_call,
        )  # fmt: skip
        takes_tools = "tools" in inspect.signature(kind).parameters
        self._parser = kind(tokenizer, self._request.tools) if takes_tools else kind(tokenizer)
        self._stream = stream
        self._text = ""
        self._token_ids: list[int] = []
        self._known: list[str] = []
        """The arguments of each call that were passed on."""

    def add(self, text: str, token_ids: Sequence[int], is_last: bool) -> ReadText:
        before, ids_before = self._text, list(self._token_ids)
        self._text += text
        self._token_ids += token_ids
        if not self._stream:
            return self._whole() if is_last else ReadText()
        read = ReadText()
        if text:
            delta = self._parser.extract_tool_calls_streaming(
                before, self._text, text, ids_before, self._token_ids, list(token_ids), self._request
            )
            if delta is not None:
                read.content = delta.content or ""
                read.tool_calls += [part for call in delta.tool_calls or () if (part := self._part(call)) is not None]
        if is_last and self._known:
            self._add_rest(read)
        return read

    def _whole(self) -> ReadText:
        found = self._parser.extract_tool_calls(self._text, self._request)
        if not found.tools_called:
            return ReadText(self._text)
        parts = [
            generate_pb2.ToolCallPart(
                index=index, call_id=new_call_id(), name=call.function.name, arguments=call.function.arguments
            )
            for index, call in enumerate(found.tool_calls)
        ]
        return ReadText(found.content or "", parts)

    def _part(self, call: Any) -> generate_pb2.ToolCallPart | None:
        function = call.function
        arguments = (function.arguments if function is not None else None) or ""
        if call.index < len(self._known):
            self._known[call.index] += arguments
            return generate_pb2.ToolCallPart(index=call.index, arguments=arguments) if arguments else None
        self._known.append(arguments)
        name = (function.name if function is not None else None) or ""
        return generate_pb2.ToolCallPart(
            index=len(self._known) - 1, call_id=new_call_id(), name=name, arguments=arguments
        )

    def _add_rest(self, read: ReadText) -> None:
        """Add arguments that the parser has read and held back at the end of the answer."""
        rest = getattr(self._parser, "get_remaining_unstreamed_args", lambda: "")()
        if rest:
            read.tool_calls.append(generate_pb2.ToolCallPart(index=len(self._known) - 1, arguments=rest))


def _tool_choice(conversation: Conversation) -> Any:
    if conversation.tool_choice == generate_pb2.TOOL_CHOICE_NAMED:
        return {"type": "function", "function": {"name": conversation.tool_name}}
    return _CHOICES[conversation.tool_choice]


SHARED_WITH_VLLM = ("hermes", "llama3_json")
"""Our formats for which vLLM has a parser of the same name. vLLM's `openai` is the format of gpt-oss, ours is not."""


class ToolCalling:
    """The tool parser of one server."""

    def __init__(self, name: str, tokenization: Tokenization, *, is_vllm: bool = False) -> None:
        self.name = name
        self.tokenization = tokenization
        self.is_vllm = is_vllm

    @classmethod
    def of(cls, config: RolloutConfig, engine_name: str, tokenization: Tokenization) -> ToolCalling:
        """The parser that the config names. Raises ConfigError if there is none of this name."""
        name = config.tool_parser or config.agents.tool_format
        has_vllm = engine_name == "vllm"
        if config.tool_parser and config.tool_parser not in TOOL_FORMATS:
            _check_known(config.tool_parser, has_vllm=has_vllm)
        is_vllm = has_vllm and (bool(config.tool_parser) or name in SHARED_WITH_VLLM) and ":" not in name
        return cls(name, tokenization, is_vllm=is_vllm)

    def reader(self, conversation: Conversation, *, stream: bool) -> ToolCallReader:
        if self.is_vllm:
            return VllmToolReader(self.name, self.tokenization.tokenizer, conversation, stream=stream)
        return FormatReader(find_parser(self.name))

    def constraint(self, request: generate_pb2.GenerateRequest, conversation: Conversation) -> OutputConstraint | None:
        """What the request lets an answer be. None if it may be any text."""
        is_of_vllm = self.is_vllm and self.name not in SHARED_WITH_VLLM
        if is_of_vllm and calls_are_constrained(request, conversation):
            raise InvalidInput("tool_choice", f"calls of the tool parser {self.name} cannot be constrained; use auto")
        return constraint_of(request, conversation, None if is_of_vllm else SYNTAXES.get(self.name))


def _check_known(name: str, *, has_vllm: bool) -> None:
    where = "rollout.tool_parser"
    if not has_vllm:
        find_parser(name, where)
        return
    known = parser_names()
    if name not in known and ":" not in name:
        raise ConfigError(f"{where}: vLLM has no tool parser {name!r}; {hint_for_name(name, known)}")
