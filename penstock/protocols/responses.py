"""OpenAI's Responses. Nothing is stored: a request has the whole input, and answers cannot be fetched later."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import (
    Choice,
    Item,
    ItemExchange,
    TokenTexts,
    openai_error,
    sse,
    version_fields,
    whole_items,
)
from penstock.protocols.bodies import (
    UNLIMITED,
    Body,
    MaxTokens,
    Refused,
    ToolBody,
    set_format,
    text_field,
    text_of,
)
from penstock.protocols.chat import JsonSchema, OpenAIFields, TypedTool, chosen_tool, token_log_probs
from penstock.protocols.conversation import Json, Message, ToolUse
from penstock.v1 import generate_pb2

LOG_PROBS = "message.output_text.logprobs"
_STORED = Refused("nothing is stored; send the whole input")


class FunctionTool(ToolBody, TypedTool):
    """A tool that the client runs. OpenAI's own tools, which have another `type`, are refused."""

    defer_loading: Annotated[Any, Refused("all tools are shown", (False,))] = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Refused("models here have no such setting")] = None


class ResponsesBody(OpenAIFields):
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
    metadata: Json | None = None
    """Comes back with the answer."""
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

    def requests(self, session_id: str) -> list[generate_pb2.GenerateRequest]:
        request = self.base_request(session_id, max_tokens=self.max_output_tokens or UNLIMITED)
        for number, name in enumerate(self.include or ()):
            if name != LOG_PROBS:
                raise InvalidInput(f"include[{number}]", f"{name!r} is not supported; omit it")
        messages, choice = input_messages(self.input, self.instructions), chosen_tool(self.tool_choice)
        is_single = self.parallel_tool_calls is False
        self.to_conversation(messages, self.tools or (), choice, is_single=is_single).fill(request)
        if self.text is not None:
            self.text.refuse("text.")
            form = self.text.format or TextFormat()
            set_format(request, form.type, form.schema_, "text.format.schema")
        return [request]


class ResponsesExchange(ItemExchange):
    """The answer to a request of Responses."""

    id_prefix = "resp_"
    own_names: ClassVar[dict[str, str]] = {"response_format": "text.format", "max_tokens": "max_output_tokens"}

    def __init__(self, body: ResponsesBody, texts: TokenTexts) -> None:
        super().__init__(body, texts)
        self._num_events = 0

    def whole(self, choices: list[Choice]) -> Json:
        items = whole_items(choices[0])
        items[0].log_probs = self._log_probs(choices[0], 0)
        return self._response(choices[0], items)

    def begin(self, choice: Choice) -> list[str]:
        started = self._response(choice, []) | {"status": "in_progress", "incomplete_details": None, "usage": None}
        return [self._event(kind, response=started) for kind in ("response.created", "response.in_progress")]

    def item_events(self, step: Literal["begin", "grow", "end"], item: Item, text: str, choice: Choice) -> list[str]:
        if step == "grow":
            if item.call_id:
                return [self._item_event("function_call_arguments.delta", item, delta=text)]
            delta = {"content_index": 0, "delta": text, "logprobs": self._log_probs(choice, choice.num_before)}
            return [self._item_event("output_text.delta", item, **delta)]
        place = {"output_index": item.index}
        if step == "begin":
            shown = _item(item) if item.call_id else _item(item) | {"content": []}
            begun = [self._event("response.output_item.added", **place, item=shown)]
            if not item.call_id:
                begun.append(self._item_event("content_part.added", item, content_index=0, part=_part(item)))
            return begun
        if item.call_id:
            ended = [self._item_event("function_call_arguments.done", item, arguments=item.text, name=item.name)]
        else:
            done = {"content_index": 0, "text": item.text, "logprobs": item.log_probs}
            ended = [self._item_event("output_text.done", item, **done)]
            ended.append(self._item_event("content_part.done", item, content_index=0, part=_part(item)))
        return [*ended, self._event("response.output_item.done", **place, item=_item(item))]

    def end(self, choices: list[Choice]) -> list[str]:
        [choice] = choices
        if len(self.items) == 1:
            self.items[0].log_probs = self._log_probs(choice, 0)
        events = super().end(choices)
        kind = "response.incomplete" if choice.is_cut else "response.completed"
        return [*events, self._event(kind, response=self._response(choice, self.items))]

    def failed(self, error: PenstockError) -> list[str]:
        fields = openai_error(error)
        return [self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])]

    def _item_event(self, kind: str, item: Item, **fields: Any) -> str:
        return self._event(f"response.{kind}", item_id=_item_id(item), output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse(content, kind)

    def _log_probs(self, choice: Choice, start: int) -> list[Json]:
        is_wanted = LOG_PROBS in (self.body.include or ())
        return token_log_probs(choice, start, len(choice.token_ids), self.texts) if is_wanted else []

    def _response(self, choice: Choice, items: list[Item]) -> Json:
        body = self.body
        is_cut = choice.is_cut
        num_in, num_out = choice.num_prompt_tokens, len(choice.token_ids)
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": body.model,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "output": [_item(item) for item in items],
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


def _item_id(item: Item) -> str:
    return f"{'fc' if item.call_id else 'msg'}_{item.item_id}"


def _item(item: Item) -> Json:
    fields: Json = {"type": "message", "role": "assistant", "content": [_part(item)]}
    if item.call_id:
        fields = {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.text}
    return {"id": _item_id(item), "status": item.status, **fields}


def _part(item: Item) -> Json:
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.log_probs}


def input_messages(given: str | list[Json], instructions: str | None) -> tuple[Message, ...]:
    """Messages of an input. Calls in a row, and texts before and after them, become one message of the assistant."""
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*messages, Message("user", given))
    for number, item in enumerate(given):
        path, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            role = text_field(item, "role", path)
            message = Message("system" if role == "developer" else role, _content(item, "content", path))
            last = messages[-1] if messages else None
            if message.role == "assistant" and last is not None and last.tool_calls:  # text that goes on after a call
                messages[-1] = Message("assistant", last.content + message.content, last.tool_calls)
            else:
                messages.append(message)
        elif kind == "function_call":
            call = ToolUse(*(text_field(item, name, path) for name in ("call_id", "name", "arguments")))
            last = messages[-1] if messages and messages[-1].role == "assistant" else None
            if last is not None:
                messages[-1] = Message("assistant", last.content, (*last.tool_calls, call))
            else:
                messages.append(Message("assistant", "", (call,)))
        elif kind == "function_call_output":
            text = _content(item, "output", path)
            messages.append(Message("tool", text, tool_call_id=text_field(item, "call_id", path)))
        else:
            raise InvalidInput(f"{path}.type", f"{kind!r} is not supported; send messages, calls and their outputs")
    return tuple(messages)


def _content(item: Json, name: str, path: str) -> str:
    if item.get(name) is None:
        raise InvalidInput(f"{path}.{name}", "must be text or a list of texts")
    return text_of(item[name], f"{path}.{name}")
