"""How the tool calls of a server's answers are read and constrained: by vLLM's own parsers, or by our tool formats.

A request may constrain its answer: a JSON schema for its text, and calls that are forced, strict or single. A call is
constrained in the format in which the model writes it, so that the tokens of a forced call are those that the model
would sample by itself. Structural tags have xgrammar's form, which vLLM takes unchanged.

A reader splits the text of an answer into content and tool calls while it grows. Text is held back from the place where
a call may begin. A call is passed on when it is complete; text that looked like a call and is not one becomes content.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config.rollout import RolloutConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.protocols.chat import TOOL_CHOICES
from penstock.protocols.conversation import Conversation, Json
from penstock.user_code import hint_for_name
from penstock.v1 import generate_pb2
from penstock_rollout.agents.tool_calls import PYTHON_TAG, TOOL_FORMATS, MalformedCall, ToolCallParser, find_parser
from penstock_rollout.engines.engine import OutputConstraint
from penstock_rollout.tokenization import Tokenization


@dataclass(frozen=True)
class CallSyntax:
    """How a tool format writes calls, around the JSON of their arguments."""

    begin: str
    """`%s` is the name of the tool as JSON text."""
    end: str
    separator: str
    trigger: str
    """The text that begins a call and nothing else."""
    find: Callable[[str], int]
    """Finds the place in the text of an answer where a call begins, or may begin. The length of the text if nowhere."""
    before: str = ""
    after: str = ""
    """Text before the first and after the last call."""
    closer: str = ""
    """The text that ends each call, if every call has one."""


def _possible_start(text: str) -> int:
    """The first place of a Hermes call, or of the beginning of its opener at the end of the text."""
    opener = "<tool_call>"
    return text.find(opener) if opener in text else len(text) - num_begun(text, opener)


def num_begun(text: str, word: str) -> int:
    """How many of the last characters may be the beginning of a word, which is not in the text yet."""
    return next((n for n in range(len(word) - 1, 0, -1) if text.endswith(word[:n])), 0)


def _json_turn(text: str) -> int:
    """A Llama turn is a call or no call as a whole."""
    started = text.lstrip()
    is_call = started.startswith("{") or started[: len(PYTHON_TAG)] == PYTHON_TAG[: len(started)]
    return 0 if is_call else len(text)


SYNTAXES = {
    "hermes": CallSyntax(
        '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>",
        find=_possible_start, closer="</tool_call>",
    ),
    "llama3_json": CallSyntax(
        '{"name": %s, "parameters": ', "}", separator="; ", trigger='{"name": "', find=_json_turn
    ),
    "openai": CallSyntax(
        '{"type": "function", "function": {"name": %s, "arguments": ', "}}", separator=", ", trigger='{"tool_calls"',
        find=lambda text: text.find("{") if "{" in text else len(text), before='{"tool_calls": [', after="]}",
    ),
}  # fmt: skip


def constraint_of(
    request: generate_pb2.GenerateRequest, conversation: Conversation, syntax: CallSyntax | None
) -> OutputConstraint | None:
    """The constraint of a request, or None. `syntax` is None if calls of the server's format cannot be constrained."""
    wanted = request.WhichOneof("output_format")
    if not calls_are_constrained(request, conversation):
        if wanted == "json_schema":
            return OutputConstraint("json_schema", request.json_schema)
        return OutputConstraint("json_object") if wanted == "json_object" else None
    if syntax is None:
        raise InvalidInput("tool_choice", "calls cannot be forced in the tool format of this server; use auto")
    is_forced, is_single = _is_forced(request), request.single_tool_call
    functions = [tool["function"] for tool in conversation.tools]
    if conversation.tool_choice == generate_pb2.TOOL_CHOICE_NAMED:
        functions = [function for function in functions if function["name"] == conversation.tool_name]
    tags = [_tag(function, syntax, is_forced=is_forced) for function in functions]
    calls: Json = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    one_text = calls  # all calls, with the text around them
    if syntax.before:
        frame = [{"type": "const_string", "value": text} for text in (syntax.before, syntax.after)]
        one_text = {"type": "sequence", "elements": [frame[0], calls, frame[1]]}
    if is_forced:
        return _structural_tag(one_text)
    if wanted is not None:
        schema = json.loads(request.json_schema) if wanted == "json_schema" else {"type": "object"}
        return _structural_tag({"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, one_text]})
    if syntax.before:
        tags = [{"type": "tag", "begin": syntax.before, "content": calls, "end": syntax.after}]
    # Any text, and calls in it. After a single call the answer ends.
    anywhere = {"type": "triggered_tags", "triggers": [syntax.trigger], "tags": tags, "at_least_one": False}
    return _structural_tag({**anywhere, "stop_after_first": is_single})


def calls_are_constrained(request: generate_pb2.GenerateRequest, conversation: Conversation) -> bool:
    if not conversation.tools or request.tool_choice == generate_pb2.TOOL_CHOICE_NONE:
        return False
    is_strict = any(tool["function"].get("strict") for tool in conversation.tools)
    has_format = request.WhichOneof("output_format") is not None
    return _is_forced(request) or is_strict or request.single_tool_call or has_format


def _is_forced(request: generate_pb2.GenerateRequest) -> bool:
    return request.tool_choice in (generate_pb2.TOOL_CHOICE_REQUIRED, generate_pb2.TOOL_CHOICE_NAMED)


def _tag(function: Json, syntax: CallSyntax, *, is_forced: bool) -> Json:
    """One call of a tool. Its arguments fit its schema if it is strict, or if the call is forced."""
    is_strict = function.get("strict") or is_forced
    schema: Any = function.get("parameters") if is_strict else None
    content = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
    begin = syntax.begin % json.dumps(function["name"])
    return {"type": "tag", "begin": begin, "content": content, "end": syntax.end}


def _structural_tag(form: Json) -> OutputConstraint:
    return OutputConstraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@dataclass
class ReadText:
    """What new text of an answer turned out to be."""

    content: str = ""
    tool_calls: list[generate_pb2.ToolCallPart] = field(default_factory=list)


class FormatReader:
    """Reads calls in one of the formats of `rollout.agents.tool_format`."""

    def __init__(self, parse: ToolCallParser, syntax: CallSyntax | None) -> None:
        """Without a `syntax`, the parser is the user's own and gets the whole answer."""
        self._parse = parse
        self._find: Callable[[str], int] = syntax.find if syntax else lambda text: 0
        self._closer = syntax.closer if syntax else ""
        self._num_calls = 0
        self._held = ""
        self._is_after_call = False

    def add(self, text: str, token_ids: Sequence[int], is_last: bool) -> ReadText:
        """Add new text with special tokens. `token_ids` are the ids sampled since the last call of `add`."""
        self._held += text
        read = ReadText()
        while self._closer and (end := self._held.find(self._closer, self._find(self._held))) >= 0:
            end += len(self._closer)
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
            read.tool_calls.append(_new_call(self._num_calls, call.name, arguments))
            self._num_calls += 1
        self._is_after_call = True

    def _add_content(self, text: str, read: ReadText) -> None:
        """White space after a call only separates it from the next one."""
        if not self._is_after_call or text.strip():
            read.content += text


def _new_call(index: int, name: str, arguments: str) -> generate_pb2.ToolCallPart:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return generate_pb2.ToolCallPart(index=index, call_id=call_id, name=name, arguments=arguments)


_CHOICES = {number: name for name, number in TOOL_CHOICES.items()}


class VllmToolReader:
    """Reads one answer with a tool parser of vLLM."""

    def __init__(self, name: str, tokenizer: Any, conversation: Conversation, *, stream: bool) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        kind = ToolParserManager.get_tool_parser(name)
        named = {"type": "function", "function": {"name": conversation.tool_name}}
        self._request = ChatCompletionRequest(
            model="", messages=[], tools=list(conversation.tools),
            tool_choice=_CHOICES.get(conversation.tool_choice, named),
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
            # Arguments that the parser has read and held back at the end of the answer.
            rest = getattr(self._parser, "get_remaining_unstreamed_args", lambda: "")()
            if rest:
                read.tool_calls.append(generate_pb2.ToolCallPart(index=len(self._known) - 1, arguments=rest))
        return read

    def _whole(self) -> ReadText:
        found = self._parser.extract_tool_calls(self._text, self._request)
        if not found.tools_called:
            return ReadText(self._text)
        functions = [call.function for call in found.tool_calls]
        parts = [_new_call(index, function.name, function.arguments) for index, function in enumerate(functions)]
        return ReadText(found.content or "", parts)

    def _part(self, call: Any) -> generate_pb2.ToolCallPart | None:
        function = call.function
        arguments = (function.arguments if function is not None else None) or ""
        if call.index < len(self._known):
            self._known[call.index] += arguments
            return generate_pb2.ToolCallPart(index=call.index, arguments=arguments) if arguments else None
        self._known.append(arguments)
        name = (function.name if function is not None else None) or ""
        return _new_call(len(self._known) - 1, name, arguments)


ToolCallReader = FormatReader | VllmToolReader

SHARED_WITH_VLLM = ("hermes", "llama3_json")
"""Our formats for which vLLM has a parser of the same name. vLLM's `openai` is the format of gpt-oss, ours is not."""


@dataclass(frozen=True)
class ToolCalling:
    """The tool parser of one server."""

    name: str
    tokenization: Tokenization
    is_vllm: bool = False

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
        return FormatReader(find_parser(self.name), SYNTAXES.get(self.name))

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
    from vllm.tool_parsers import ToolParserManager

    known: list[str] = ToolParserManager.list_registered()
    if name not in known and ":" not in name:
        raise ConfigError(f"{where}: vLLM has no tool parser {name!r}; {hint_for_name(name, known)}")
