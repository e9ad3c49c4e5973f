"""Anthropic's Messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.api.conversion import json_text
from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import Choice, Item, ItemExchange, anthropic_fields, sse, version_fields, whole_items
from penstock.protocols.bodies import (
    Body,
    Cache,
    Identifier,
    MaxTokens,
    NoEffect,
    Refused,
    SamplingBody,
    ToolBody,
    set_format,
    text_field,
    text_of,
)
from penstock.protocols.conversation import Conversation, Json, Message, ToolUse
from penstock.v1 import generate_pb2

_CHOICES = {
    "auto": generate_pb2.TOOL_CHOICE_UNSPECIFIED,
    "any": generate_pb2.TOOL_CHOICE_REQUIRED,
    "none": generate_pb2.TOOL_CHOICE_NONE,
    "tool": generate_pb2.TOOL_CHOICE_NAMED,
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop_text": "stop_sequence"}


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class AnthropicTool(ToolBody):
    """A tool that the client runs. Anthropic's own tools, which have another `type`, are refused."""

    parameters: Annotated[Json, Field(alias="input_schema")]
    type: Literal["custom"] | None = None
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
    tools: list[AnthropicTool] | None = None
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

    def read_conversation(self) -> Conversation:
        choice = self.tool_choice or ToolChoice(type="auto")
        messages = [Message("system", text_of(self.system, "system"))] if self.system else []
        messages += [message for number, one in enumerate(self.messages) for message in _messages(one, number)]
        is_single = bool(choice.disable_parallel_tool_use)
        named = _CHOICES[choice.type], choice.name
        return self.to_conversation(messages, self.tools or (), named, is_single=is_single)


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: list[str] | None = None
    metadata: Identifier = None
    service_tier: Annotated[Any, NoEffect("there is one tier")] = None
    container: Annotated[Any, Refused("there are no containers")] = None
    inference_geo: Annotated[Any, Refused("the run is where it is")] = None
    diagnostics: Annotated[Any, Refused("there are none")] = None

    def requests(self, session_id: str) -> list[generate_pb2.GenerateRequest]:
        request = self.base_request(session_id, max_tokens=self.max_tokens, stop=self.stop_sequences)
        if self.messages[-1].role == "assistant":
            where = f"messages[{len(self.messages) - 1}].role"
            raise InvalidInput(where, "must not be assistant in the last message: answers are not prefilled; omit it")
        self.read_conversation().fill(request)
        if self.output_config is not None:
            self.output_config.refuse("output_config.")
            if (form := self.output_config.format) is not None:
                if form.get("type") != "json_schema":
                    raise InvalidInput("output_config.format.type", "must be json_schema")
                set_format(request, "json_schema", form.get("schema"), "output_config.format.schema")
        return [request]


class CountBody(PromptBody):
    """The body of /v1/messages/count_tokens."""

    def request(self) -> generate_pb2.GenerateRequest:
        request = self.base_request("", max_tokens=1)
        self.read_conversation().fill(request)
        request.render_only = True
        return request


class MessagesExchange(ItemExchange):
    """The answer to a request of Messages."""

    id_prefix = "msg_"
    own_names: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "response_format": "output_config.format"}

    def whole(self, choices: list[Choice]) -> Json:
        content = [_block(item) for item in whole_items(choices[0])]
        return self._message(choices[0], content) | _ending(choices[0]) | version_fields(choices)

    def begin(self, choice: Choice) -> list[str]:
        message = self._message(choice, []) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": choice.num_prompt_tokens, "output_tokens": 0}
        return [_event("message_start", message=message)]

    def item_events(self, step: Literal["begin", "grow", "end"], item: Item, text: str, choice: Choice) -> list[str]:
        if step == "begin":
            return [_event("content_block_start", index=item.index, content_block=_block(item))]
        if step == "end":
            return [_event("content_block_stop", index=item.index)]
        delta = {"type": "text_delta", "text": text}
        if item.call_id:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [_event("content_block_delta", index=item.index, delta=delta)]

    def end(self, choices: list[Choice]) -> list[str]:
        ending = {"delta": _ending(choices[0]), "usage": _usage(choices[0]), **version_fields(choices)}
        return [*super().end(choices), _event("message_delta", **ending), _event("message_stop")]

    def failed(self, error: PenstockError) -> list[str]:
        return [sse(anthropic_fields(error.http_status, str(error)), "error")]

    def _message(self, choice: Choice, content: list[Json]) -> Json:
        return {
            "id": self.answer_id, "type": "message", "role": "assistant", "model": self.body.model,
            "content": content, "usage": _usage(choice),
        }  # fmt: skip


def _block(item: Item) -> Json:
    if not item.call_id:
        return {"type": "text", "text": item.text, "citations": None}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _input(item.text)}


def _usage(choice: Choice) -> Json:
    return {"input_tokens": choice.num_prompt_tokens, "output_tokens": len(choice.token_ids)}


def _ending(choice: Choice) -> Json:
    reason = _STOP_REASONS.get(choice.ending or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_text or None}


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)


def _messages(message: InputMessage, number: int) -> list[Message]:
    """Our messages for one of Anthropic's. The results of tools in it become separate messages before its text."""
    path = f"messages[{number}].content"
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    text, reasoning = "", ""
    calls: list[ToolUse] = []
    results: list[Message] = []
    for index, block in enumerate(message.content):
        kind, here = block.get("type"), f"{path}[{index}]"
        if kind == "text":
            text += text_field(block, "text", here)
        elif kind == "tool_use" and message.role == "assistant":
            arguments = json_text(block.get("input") or {}, f"{here}.input")
            calls.append(ToolUse(text_field(block, "id", here), text_field(block, "name", here), arguments))
        elif kind == "tool_result" and message.role == "user":
            content = text_of(block.get("content") or "", f"{here}.content")
            results.append(Message("tool", content, tool_call_id=text_field(block, "tool_use_id", here)))
        elif kind == "thinking" and message.role == "assistant":
            reasoning += text_field(block, "thinking", here)
        else:
            raise InvalidInput(here, f"a block {kind!r} cannot be read in a message of {message.role}; send text")
    if results and not text:
        return results
    return [*results, Message(message.role, text, tuple(calls), reasoning=reasoning)]


def _input(arguments: str) -> Json:
    """The arguments of a call. Arguments that a limit has cut are not JSON, and are given as text."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_arguments": arguments}
