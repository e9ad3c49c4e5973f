"""Anthropic's Messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import Choice, anthropic_fields, version_fields
from penstock.protocols.bodies import (
    Body,
    Cache,
    Identifier,
    MaxTokens,
    NoEffect,
    Refused,
    SamplingBody,
    function_tool,
    json_text,
    set_json_schema,
)
from penstock.protocols.conversation import Conversation, Json, Message, ToolCall
from penstock.v1 import generate_pb2

_CHOICES = {
    "auto": generate_pb2.TOOL_CHOICE_UNSPECIFIED,
    "any": generate_pb2.TOOL_CHOICE_REQUIRED,
    "none": generate_pb2.TOOL_CHOICE_NONE,
    "tool": generate_pb2.TOOL_CHOICE_NAMED,
}


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class Tool(Body):
    """A tool that the client runs. Anthropic's own tools, which have another `type`, are refused."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Cache = None
    eager_input_streaming: Annotated[Any, NoEffect("arguments are sent as they come")] = None
    allowed_callers: Annotated[Any, Refused("only the model calls tools", (["direct"],))] = None
    defer_loading: Annotated[Any, Refused("all tools are shown", (False,))] = None
    input_examples: Annotated[Any, Refused("put examples into the description", ([],))] = None


class ToolChoice(Body):
    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    format: Json | None = None
    """`{"type": "json_schema", "schema": …}`"""
    effort: Annotated[Any, Refused("set it by chat_template_kwargs, if the template has it")] = None
    task_budget: Annotated[Any, Refused("use max_tokens")] = None


class PromptBody(SamplingBody):
    """Fields that /v1/messages and /v1/messages/count_tokens share."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[Json] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[
        Any, Refused("set it by chat_template_kwargs, if the template has it", ({"type": "disabled"},))
    ] = None
    cache_control: Cache = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[Any, Refused("the client runs its tools", ([],))] = None
    context_management: Annotated[Any, Refused("send the messages that the model is to read")] = None
    speed: Annotated[Any, Refused("there is one speed", ("standard",))] = None
    user_profile_id: Identifier = None
    workspace_id: Identifier = None

    def conversation(self) -> Conversation:
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = self.tools or []
        system = [Message("system", _texts(self.system, "system"))] if self.system else []
        messages = [message for number, one in enumerate(self.messages) for message in _messages(one, number)]
        for number, tool in enumerate(tools):
            tool.refuse(f"tools[{number}].")
        return Conversation(
            messages=(*system, *messages),
            tools=tuple(
                function_tool(tool.name, tool.description, tool.input_schema, tool.strict, f"tools[{number}]")
                for number, tool in enumerate(tools)
            ),
            tool_choice=_CHOICES[choice.type],
            tool_name=choice.name,
            single_tool_call=bool(tools) and bool(choice.disable_parallel_tool_use),
            template_arguments=self.chat_template_kwargs or {},
        )


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: list[str] | None = None
    metadata: Identifier = None
    service_tier: Annotated[Any, NoEffect("there is one tier")] = None
    container: Annotated[Any, Refused("there are no containers")] = None
    inference_geo: Annotated[Any, Refused("the run is where it is")] = None
    diagnostics: Annotated[Any, Refused("there are none")] = None


class CountBody(PromptBody):
    """The body of /v1/messages/count_tokens."""

    def request(self, session_id: str = "") -> generate_pb2.GenerateRequest:
        request = self.base_request(session_id, max_tokens=1)
        self.conversation().fill(request)
        request.render_only = True
        return request


class MessagesExchange:
    """One request of Messages and its answer."""

    field_names: ClassVar[Mapping[str, str]] = {
        "tools_json": "tools", "template_arguments_json": "chat_template_kwargs", "stop": "stop_sequences",
        "response_format": "output_config.format",
    }  # fmt: skip

    def __init__(self, body: MessagesBody, session_id: str = "") -> None:
        self.body = body
        self.session_id = session_id
        self.answer_id = f"msg_{uuid.uuid4().hex[:24]}"
        self._open = ""
        """Type of the content block that was begun and not ended, or empty."""
        self._num_blocks = 0

    def requests(self) -> list[generate_pb2.GenerateRequest]:
        body = self.body
        request = body.base_request(self.session_id, max_tokens=body.max_tokens, stop=body.stop_sequences)
        if body.messages[-1].role == "assistant":
            where = f"messages[{len(body.messages) - 1}].role"
            raise InvalidInput(
                where, "must not be assistant in the last message: answers are not prefilled; leave it out"
            )
        body.conversation().fill(request)
        if body.output_config is not None:
            body.output_config.refuse("output_config.")
            if (form := body.output_config.format) is not None:
                if form.get("type") != "json_schema":
                    raise InvalidInput("output_config.format.type", "must be json_schema")
                set_json_schema(request, form.get("schema"), "output_config.format.schema")
        return [request]

    def whole(self, choices: list[Choice]) -> Json:
        [choice] = choices
        message = choice.message
        content: list[Json] = []
        if message.content or not message.tool_calls:
            content.append({"type": "text", "text": message.content, "citations": None})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)}
            for call in message.tool_calls
        ]
        return self._message(choice) | {"content": content, **_ending(choice)} | version_fields(choices)

    def begin(self, choice: Choice) -> list[str]:
        message = self._message(choice) | {"content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": choice.num_prompt_tokens, "output_tokens": 0}
        return [_event("message_start", message=message)]

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        events = []
        if chunk.text:
            if self._open != "text":
                events += self._begin_block({"type": "text", "text": "", "citations": None})
            events.append(self._delta({"type": "text_delta", "text": chunk.text}))
        for part in chunk.tool_calls:
            if part.call_id:
                events += self._begin_block({"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
            if part.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events

    def end(self, choices: list[Choice]) -> list[str]:
        [choice] = choices
        events = [] if self._num_blocks else self._begin_block({"type": "text", "text": "", "citations": None})
        events += self._end_block()
        usage = {"input_tokens": choice.num_prompt_tokens, "output_tokens": len(choice.token_ids)}
        events.append(_event("message_delta", delta=_ending(choice), usage=usage, **version_fields(choices)))
        return [*events, _event("message_stop")]

    def failed(self, error: PenstockError) -> list[str]:
        return [f"event: error\ndata: {json.dumps(anthropic_fields(error.http_status, str(error)))}\n\n"]

    def _message(self, choice: Choice) -> Json:
        usage = {"input_tokens": choice.num_prompt_tokens, "output_tokens": len(choice.token_ids)}
        return {
            "id": self.answer_id, "type": "message", "role": "assistant", "model": self.body.model, "usage": usage
        }  # fmt: skip

    def _begin_block(self, block: Json) -> list[str]:
        ended = self._end_block()
        self._open = block["type"]
        self._num_blocks += 1
        return [*ended, _event("content_block_start", index=self._num_blocks - 1, content_block=block)]

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end_block(self) -> list[str]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._num_blocks - 1)]


def _ending(choice: Choice) -> Json:
    reason = "end_turn"
    if choice.is_cut:
        reason = "max_tokens"
    elif choice.message.tool_calls:
        reason = "tool_use"
    elif choice.stop_text:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_text or None}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _messages(message: InputMessage, number: int) -> list[Message]:
    """Our messages for one of Anthropic's. The results of tools in it become separate messages, before its text."""
    path = f"messages[{number}].content"
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    text, reasoning = "", ""
    calls: list[ToolCall] = []
    results: list[Message] = []
    for index, block in enumerate(message.content):
        kind, here = block.get("type"), f"{path}[{index}]"
        if kind == "text":
            text += _text(block, "text", here)
        elif kind == "tool_use" and message.role == "assistant":
            arguments = json_text(block.get("input") or {}, f"{here}.input")
            calls.append(ToolCall(_text(block, "id", here), _text(block, "name", here), arguments))
        elif kind == "tool_result" and message.role == "user":
            content = _texts(block.get("content") or "", f"{here}.content")
            results.append(Message("tool", content, tool_call_id=_text(block, "tool_use_id", here)))
        elif kind == "thinking" and message.role == "assistant":
            reasoning += _text(block, "thinking", here)
        else:
            raise InvalidInput(here, f"a block {kind!r} cannot be read in a message of {message.role}; send text")
    if results and not text:
        return results
    return [*results, Message(message.role, text, tuple(calls), reasoning=reasoning)]


def _text(block: Json, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{path}.{name}", "must be text")
    return value


def _texts(content: Any, path: str) -> str:
    """Text, or the texts of a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(path, "must be text or a list of blocks")
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise InvalidInput(f"{path}[{index}]", "must be a block of text; models here read text only")
        texts.append(_text(block, "text", f"{path}[{index}]"))
    return "".join(texts)


def _input(arguments: str) -> Json:
    """The arguments of a call. Those that a limit has cut are not JSON, and are given as text."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_arguments": arguments}
