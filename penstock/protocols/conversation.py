"""The one form of a conversation: a call of any protocol becomes a `Conversation` of messages, tools and arguments of
the chat template.

`fill` writes it into a GenerateRequest, and `from_request` reads it back. The rollout server renders it to token ids
with the model's chat template; a request with `render_only` returns these ids without an answer. `AnswerMessage`
collects the chunks of the answer; its `message` is the assistant's message as a client would send it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.api.conversion import parse_json
from penstock.errors import InvalidInput
from penstock.v1 import generate_pb2, prompts_pb2

Json = dict[str, Any]
RESERVED_ARGUMENTS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages",
     "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
     "tools", "truncation", "max_length"}
)  # fmt: skip
"""Arguments of the function that renders the template. A call cannot set them: `chat_template` would be code."""


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool, by the model."""

    call_id: str
    """Chosen by the rollout server, unique in a conversation. The result of the call names it."""
    name: str
    arguments: str
    """JSON text of an object. A limit may have cut it."""

    def to_json(self) -> Json:
        """The call in the form of OpenAI's chat completions, which chat templates read."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ToolUse:
        function, arguments = fields["function"], fields["function"].get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return cls(str(fields.get("id", "")), str(function["name"]), text)


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the chat template knows."""
    content: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    """The calls of an assistant's message, in order."""
    tool_call_id: str = ""
    """Which call a message of the role `tool` answers."""
    name: str = ""
    reasoning: str = ""
    """The reasoning before the content, if it is kept apart from it. Templates read it as `reasoning_content`."""

    def to_proto(self) -> prompts_pb2.Message:
        fields = {
            "name": self.name,
            "tool_calls": [call.to_json() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning,
        }
        given = {name: value for name, value in fields.items() if value}
        text = json.dumps(given) if given else ""
        return prompts_pb2.Message(role=self.role, content=self.content, fields_json=text)

    @classmethod
    def from_proto(cls, message: prompts_pb2.Message) -> Message:
        fields = json.loads(message.fields_json) if message.fields_json else {}
        return cls(
            role=message.role,
            content=message.content,
            tool_calls=tuple(ToolUse.from_json(call) for call in fields.get("tool_calls", ())),
            tool_call_id=str(fields.get("tool_call_id", "")),
            name=str(fields.get("name", "")),
            reasoning=str(fields.get("reasoning_content", "")),
        )


@dataclass(frozen=True)
class Conversation:
    """What the model is to answer: everything that the chat template renders, and which tools may be called."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    """`{"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema, "strict": …}}`"""
    tool_choice: generate_pb2.ToolChoice = generate_pb2.TOOL_CHOICE_UNSPECIFIED
    tool_name: str = ""
    """The tool that TOOL_CHOICE_NAMED asks for."""
    single_tool_call: bool = False
    """Whether the answer may have one call at most."""
    template_arguments: Json = field(default_factory=dict)
    """Further arguments of the chat template, such as `{"enable_thinking": False}`."""

    def fill(self, request: generate_pb2.GenerateRequest) -> None:
        """Write the conversation into a request that has none yet."""
        request.messages.extend(message.to_proto() for message in self.messages)
        request.tools_json = json.dumps(self.tools) if self.tools else ""
        request.tool_choice, request.tool_name = self.tool_choice, self.tool_name
        request.single_tool_call = self.single_tool_call
        request.template_arguments_json = json.dumps(self.template_arguments) if self.template_arguments else ""

    @classmethod
    def from_request(cls, request: generate_pb2.GenerateRequest) -> Conversation:
        """Read a request. Raises InvalidInput with the path of a field that has another form."""
        tools = _tools(request.tools_json)
        _check_choice(request, tool_names(tools))
        return cls(
            messages=tuple(_message(number, message) for number, message in enumerate(request.messages)),
            tools=tools,
            tool_choice=request.tool_choice,
            tool_name=request.tool_name,
            single_tool_call=request.single_tool_call,
            template_arguments=_template_arguments(request.template_arguments_json),
        )


class AnswerMessage:
    """The assistant's message of an answer, collected chunk by chunk."""

    def __init__(self) -> None:
        self._content = ""
        self._calls: list[ToolUse] = []

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        self._content += chunk.text
        for part in chunk.tool_calls:
            if part.index == len(self._calls):
                self._calls.append(ToolUse(part.call_id, part.name, part.arguments))
            else:
                before = self._calls[part.index]
                self._calls[part.index] = ToolUse(before.call_id, before.name, before.arguments + part.arguments)

    @property
    def message(self) -> Message:
        return Message("assistant", self._content, tuple(self._calls))


def tool_names(tools: Iterable[Json]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _message(number: int, message: prompts_pb2.Message) -> Message:
    try:
        return Message.from_proto(message)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"messages[{number}].fields_json", "needs tool_calls as in OpenAI's API") from error


def _tools(text: str) -> tuple[Json, ...]:
    try:
        tools = tuple(parse_json(text or "[]"))
        names = tool_names(tools)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("tools_json", "must be a JSON list of tools in OpenAI's function format") from error
    for number, name in enumerate(names):
        if not isinstance(name, str) or name in names[:number]:
            raise InvalidInput(f"tools[{number}].name", f"is not text or is used twice: {name!r}")
    return tools


def _check_choice(request: generate_pb2.GenerateRequest, names: list[str]) -> None:
    if request.tool_choice in (generate_pb2.TOOL_CHOICE_REQUIRED, generate_pb2.TOOL_CHOICE_NAMED) and not names:
        raise InvalidInput("tool_choice", "asks for a call, but there are no tools")
    if request.tool_choice == generate_pb2.TOOL_CHOICE_NAMED and request.tool_name not in names:
        raise InvalidInput("tool_choice", f"names {request.tool_name!r}, but the tools are {', '.join(names)}")


def _template_arguments(text: str) -> Json:
    try:
        arguments = parse_json(text or "{}")
    except ValueError as error:
        raise InvalidInput("template_arguments_json", f"is not valid JSON: {error}") from error
    if not isinstance(arguments, dict) or arguments.keys() & RESERVED_ARGUMENTS:
        raise InvalidInput(
            "template_arguments_json", f"must be a JSON object without {', '.join(sorted(RESERVED_ARGUMENTS))}"
        )
    return arguments
