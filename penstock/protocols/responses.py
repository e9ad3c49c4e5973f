"""OpenAI's Responses. Nothing is stored: a request has the whole input, and answers cannot be fetched later."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import Choice, TokenTexts, now_s, openai_error, version_fields
from penstock.protocols.bodies import (
    UNLIMITED,
    Body,
    Cache,
    Identifier,
    MaxTokens,
    NoEffect,
    Refused,
    SamplingBody,
    function_tool,
    set_json_schema,
    text_of,
)
from penstock.protocols.chat import StreamOptions, chosen_tool, token_log_probs
from penstock.protocols.conversation import Conversation, Json, Message, ToolCall
from penstock.v1 import generate_pb2

LOG_PROBS = "message.output_text.logprobs"
_STORED = Refused("nothing is stored; send the whole input")


class FunctionTool(Body):
    """A tool that the client runs. OpenAI's own tools, which have another `type`, are refused."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, Refused("all tools are shown", (False,))] = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Refused("models here have no such setting")] = None


class ResponsesBody(SamplingBody):
    """The body of /v1/responses."""

    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` is honoured, others are refused."""
    stream_options: StreamOptions | None = None
    metadata: Json | None = None
    """Comes back with the answer."""
    store: Annotated[Any, NoEffect("nothing is stored")] = None
    user: Identifier = None
    safety_identifier: Identifier = None
    prompt_cache_key: Cache = None
    prompt_cache_options: Cache = None
    prompt_cache_retention: Cache = None
    service_tier: Annotated[Any, NoEffect("there is one tier")] = None
    previous_response_id: Annotated[Any, _STORED] = None
    conversation: Annotated[Any, _STORED] = None
    prompt: Annotated[Any, _STORED] = None
    background: Annotated[Any, Refused("nothing is stored; stream the answer", (False,))] = None
    context_management: Annotated[Any, Refused("send the input that the model is to read", ([],))] = None
    truncation: Annotated[Any, Refused("send a shorter input", ("disabled",))] = None
    top_logprobs: Annotated[Any, Refused("only the sampled token's is known", (0,))] = None
    max_tool_calls: Annotated[Any, Refused("it limits OpenAI's own tools")] = None
    reasoning: Annotated[Any, Refused("set it by chat_template_kwargs, if the template has it", ({},))] = None
    moderation: Annotated[Any, Refused("answers are not moderated")] = None
    access_programs: Annotated[Any, Refused("there are none")] = None
    image: Annotated[Any, Refused("models here read and write text only")] = None

    @property
    def includes_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())

    def chat(self) -> Conversation:
        choice, name = chosen_tool(self.tool_choice)
        tools = self.tools or []
        for number, tool in enumerate(tools):
            tool.refuse(f"tools[{number}].")
        return Conversation(
            messages=input_messages(self.input, self.instructions),
            tools=tuple(
                function_tool(tool.name, tool.description, tool.parameters, tool.strict, f"tools[{number}]")
                for number, tool in enumerate(tools)
            ),
            tool_choice=choice,
            tool_name=name,
            single_tool_call=bool(tools) and self.parallel_tool_calls is False,
            template_arguments=self.chat_template_kwargs or {},
        )

    def request(self, session_id: str) -> generate_pb2.GenerateRequest:
        request = self.base_request(session_id, max_tokens=self.max_output_tokens or UNLIMITED)
        for number, name in enumerate(self.include or ()):
            if name != LOG_PROBS:
                raise InvalidInput(f"include[{number}]", f"{name!r} is not supported; leave it out")
        self.chat().fill(request)
        if self.text is not None:
            self.text.refuse("text.")
            form = self.text.format or TextFormat()
            if form.type == "json_object":
                request.json_object = True
            elif form.type == "json_schema":
                set_json_schema(request, form.schema_, "text.format.schema")
        return request


class ResponsesExchange:
    """One request of Responses and its answer. The answer has a message, if it has text, and then its calls."""

    field_names: ClassVar[Mapping[str, str]] = {
        "tools_json": "tools", "template_arguments_json": "chat_template_kwargs", "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    }  # fmt: skip

    def __init__(self, body: ResponsesBody, texts: TokenTexts, session_id: str = "") -> None:
        self.body = body
        self.texts = texts
        self.session_id = session_id
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self.created = now_s()
        self._items: list[Json] = []
        """The output so far; the last item may still grow."""
        self._is_open = False
        self._num_events = 0

    def requests(self) -> list[generate_pb2.GenerateRequest]:
        return [self.body.request(self.session_id)]

    def whole(self, choices: list[Choice]) -> Json:
        [choice] = choices
        message = choice.message
        items = []
        if message.content or not message.tool_calls:
            items.append(_message_item(message.content, self._log_probs(choice, 0)))
        items += [_call_item(call.call_id, call.name, call.arguments) for call in message.tool_calls]
        return self._response(choice, items)

    def begin(self, choice: Choice) -> list[str]:
        started = self._response(choice, []) | {"status": "in_progress", "incomplete_details": None, "usage": None}
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
        ]

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        events = []
        if chunk.text:
            if not self._is_open or self._items[-1]["type"] != "message":
                events += self._begin_message()
            self._items[-1]["content"][0]["text"] += chunk.text
            start = len(choice.token_ids) - len(chunk.token_ids) // 4
            events.append(
                self._item_event("response.output_text.delta", content_index=0, delta=chunk.text,
                                 logprobs=self._log_probs(choice, start))
            )  # fmt: skip
        for part in chunk.tool_calls:
            if part.call_id:
                events += self._begin_item(_call_item(part.call_id, part.name, "") | {"status": "in_progress"})
            if part.arguments:
                self._items[-1]["arguments"] += part.arguments
                events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def end(self, choices: list[Choice]) -> list[str]:
        [choice] = choices
        events = [] if self._items else self._begin_message()
        events += self._end_item(choice)
        response = self._response(choice, self._items)
        kind = "response.incomplete" if choice.is_cut else "response.completed"
        return [*events, self._event(kind, response=response)]

    def failed(self, error: PenstockError) -> list[str]:
        fields = openai_error(error)
        return [self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])]

    def _begin_message(self) -> list[str]:
        events = self._begin_item(_message_item("", []) | {"status": "in_progress", "content": []})
        part = _text_part("", [])
        self._items[-1]["content"].append(part)
        return [*events, self._item_event("response.content_part.added", content_index=0, part=dict(part))]

    def _begin_item(self, item: Json) -> list[str]:
        ended = self._end_item(None)
        self._items.append(item)
        self._is_open = True
        index = len(self._items) - 1
        return [
            *ended,
            self._event("response.output_item.added", output_index=index, item=json.loads(json.dumps(item))),
        ]

    def _end_item(self, choice: Choice | None) -> list[str]:
        """End the item that grows. `choice` is given at the end of the answer."""
        if not self._is_open:
            return []
        self._is_open, item = False, self._items[-1]
        is_cut = choice is not None and choice.is_cut
        item["status"] = "incomplete" if is_cut else "completed"
        events = []
        if item["type"] == "message":
            [part] = item["content"]
            if choice is not None and len(self._items) == 1:
                part["logprobs"] = self._log_probs(choice, 0)
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._item_event("response.output_text.done", **done))
            events.append(self._item_event("response.content_part.done", content_index=0, part=part))
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._item_event("response.function_call_arguments.done", **done))
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _item_event(self, kind: str, **fields: Any) -> str:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(content)}\n\n"

    def _log_probs(self, choice: Choice, start: int) -> list[Json]:
        return token_log_probs(choice, start, len(choice.token_ids), self.texts) if self.body.includes_log_probs else []

    def _response(self, choice: Choice, items: list[Json]) -> Json:
        body = self.body
        is_cut = choice.is_cut
        num_in, num_out = choice.num_prompt_tokens, len(choice.token_ids)
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "model": body.model,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in body.tools or ()],
            "max_output_tokens": body.max_output_tokens,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "truncation": "disabled",
            "store": False,
            "usage": {
                "input_tokens": num_in,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_out,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_in + num_out,
            },
            **version_fields([choice]),
        }


def _message_item(text: str, log_probs: list[Json]) -> Json:
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed",
        "content": [_text_part(text, log_probs)],
    }  # fmt: skip


def _text_part(text: str, log_probs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _call_item(call_id: str, name: str, arguments: str) -> Json:
    return {
        "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed", "call_id": call_id,
        "name": name, "arguments": arguments,
    }  # fmt: skip


def input_messages(given: str | list[Json], instructions: str | None) -> tuple[Message, ...]:
    """Messages of an input. Calls in a row, and texts before and after them, become one message of the assistant."""
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*messages, Message("user", given))
    for number, item in enumerate(given):
        path, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            message = _input_message(item, path)
            last = messages[-1] if messages else None
            if message.role == "assistant" and last is not None and last.tool_calls:  # text that goes on after a call
                messages[-1] = Message("assistant", last.content + message.content, last.tool_calls)
            else:
                messages.append(message)
        elif kind == "function_call":
            call = ToolCall(_text(item, "call_id", path), _text(item, "name", path), _text(item, "arguments", path))
            last = messages[-1] if messages and messages[-1].role == "assistant" else None
            if last is not None:
                messages[-1] = Message("assistant", last.content, (*last.tool_calls, call))
            else:
                messages.append(Message("assistant", "", (call,)))
        elif kind == "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise InvalidInput(f"{path}.output", "must be text or a list of texts")
            text = text_of(output, f"{path}.output")
            messages.append(Message("tool", text, tool_call_id=_text(item, "call_id", path)))
        else:
            raise InvalidInput(f"{path}.type", f"{kind!r} is not supported; send messages, calls and their outputs")
    return tuple(messages)


def _input_message(item: Json, path: str) -> Message:
    role, content = _text(item, "role", path), item.get("content")
    if not isinstance(content, str | list):
        raise InvalidInput(f"{path}.content", "must be text or a list of texts")
    return Message("system" if role == "developer" else role, text_of(content, f"{path}.content"))


def _text(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{path}.{name}", "must be text")
    return value
