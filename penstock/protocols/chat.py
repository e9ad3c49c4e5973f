"""OpenAI's chat completions, and its completions of plain text."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import Choice, TokenTexts, now_s, openai_error, usage_of, version_fields
from penstock.protocols.bodies import (
    MAX_CHOICES,
    UNLIMITED,
    Body,
    Cache,
    Identifier,
    Int64,
    MaxTokens,
    NoEffect,
    Penalty,
    Refused,
    SamplingBody,
    TokenId,
    function_tool,
    set_json_schema,
    text_of,
)
from penstock.protocols.conversation import Conversation, Json, Message, ToolCall
from penstock.v1 import generate_pb2

TEXT_ONLY = Annotated[Any, Refused("models here read and write text only")]
TOOL_CHOICES = {
    "auto": generate_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": generate_pb2.TOOL_CHOICE_NONE,
    "required": generate_pb2.TOOL_CHOICE_REQUIRED,
}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, NoEffect("events are not padded")] = None


class OpenAIBody(SamplingBody):
    """Fields that chat completions and completions share."""

    max_tokens: MaxTokens | None = None
    seed: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[Any, Refused("log-probs are those of the model itself", ({},))] = None
    user: Identifier = None
    metadata: Annotated[Any, NoEffect("nothing is stored")] = None
    store: Annotated[Any, NoEffect("nothing is stored")] = None
    service_tier: Annotated[Any, NoEffect("there is one tier")] = None
    safety_identifier: Identifier = None
    prompt_cache_key: Cache = None
    prompt_cache_options: Cache = None
    prompt_cache_retention: Cache = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def choice_request(self, index: int, session_id: str, max_tokens: int) -> generate_pb2.GenerateRequest:
        """The request for choice `index`, without its prompt."""
        seed = None if self.seed is None else min(self.seed + index, 2**63 - 1)
        return self.base_request(session_id, max_tokens=max_tokens, seed=seed, stop=self.stop)


FromLitellm = Annotated[Any, NoEffect("litellm adds it to the answers that it sends back")]


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCallBody(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Sent back by clients that have collected the call from a stream."""
    provider_specific_fields: FromLitellm = None


class ChatMessage(Body):
    """A message, also one that an OpenAI client has received and sends back: most of its fields are null then."""

    role: str
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The reasoning before the content, which the chat template reads, as in vLLM's server."""
    refusal: Annotated[Any, Refused("models here answer with text", ("",))] = None
    annotations: Annotated[Any, Refused("models here answer with text", ([],))] = None
    audio: TEXT_ONLY = None
    images: TEXT_ONLY = None
    function_call: Annotated[Any, Refused("use tool_calls", ([],))] = None
    thinking_blocks: Annotated[Any, Refused("use reasoning_content", ([],))] = None
    reasoning_items: Annotated[Any, Refused("use reasoning_content", ([],))] = None
    provider_specific_fields: FromLitellm = None

    def message(self, path: str) -> Message:
        self.refuse(f"{path}.")
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "{}") for call in self.tool_calls or ()
        )
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=text_of(self.content, f"{path}.content"),
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            reasoning=self.reasoning_content or "",
        )


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def fill(self, request: generate_pb2.GenerateRequest) -> None:
        if self.type == "json_object":
            request.json_object = True
        elif self.type == "json_schema":
            schema = self.json_schema.schema_ if self.json_schema is not None else None
            set_json_schema(request, schema, "response_format.json_schema.schema")


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    top_logprobs: Annotated[Any, Refused("only the sampled token's is known", (0,))] = None
    functions: Annotated[Any, Refused("use tools", ([],))] = None
    function_call: Annotated[
        Any,
        Refused(
            "use tool_choice",
            (
                "none",
                "auto",
            ),
        ),
    ] = None
    modalities: Annotated[Any, Refused("models here read and write text only", (["text"],))] = None
    audio: TEXT_ONLY = None
    prediction: Annotated[Any, Refused("answers are sampled token by token")] = None
    reasoning_effort: Annotated[Any, Refused("set it by chat_template_kwargs, if the template has it")] = None
    verbosity: Annotated[Any, Refused("models here have no such setting")] = None
    web_search_options: Annotated[Any, Refused("give a tool that searches")] = None
    moderation: Annotated[Any, Refused("answers are not moderated")] = None

    def conversation(self) -> Conversation:
        choice, name = chosen_tool(self.tool_choice)
        tools = self.tools or []
        return Conversation(
            messages=tuple(message.message(f"messages[{number}]") for number, message in enumerate(self.messages)),
            tools=tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)),
            tool_choice=choice,
            tool_name=name,
            single_tool_call=bool(tools) and self.parallel_tool_calls is False,
            template_arguments=self.chat_template_kwargs or {},
        )


def chosen_tool(choice: str | Json | None) -> tuple[generate_pb2.ToolChoice, str]:
    """OpenAI's `tool_choice` as ours, with the name of the tool if it names one."""
    if choice is None or (isinstance(choice, str) and choice in TOOL_CHOICES):
        return TOOL_CHOICES[choice or "auto"], ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return generate_pb2.TOOL_CHOICE_NAMED, function["name"]
    raise InvalidInput("tool_choice", "must be auto, none, required, or a function with its name")


def _tool(tool: Tool, path: str) -> Json:
    function = tool.function
    return function_tool(function.name, function.description, function.parameters, function.strict, path)


class OpenAIExchange:
    """What the answers of chat completions and completions share."""

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(self, body: OpenAIBody, texts: TokenTexts, *, with_log_probs: bool) -> None:
        self.body = body
        self.texts = texts
        self.with_log_probs = with_log_probs
        self.field_names = {"tools_json": "tools", "template_arguments_json": "chat_template_kwargs"}
        self.answer_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = now_s()

    def whole_choice(self, choice: Choice) -> Json:
        raise NotImplementedError

    def part_choice(self, choice: Choice, chunk: generate_pb2.GenerateChunk, start: int) -> Json:
        """A choice of a chunk. `start` is the number of tokens before it."""
        raise NotImplementedError

    def log_probs(self, choice: Choice, start: int, end: int) -> Json:
        raise NotImplementedError

    def whole(self, choices: list[Choice]) -> Json:
        listed = [self.whole_choice(choice) | self._ending(choice, 0) for choice in choices]
        return self._envelope(self.kind, choices) | {"choices": listed, "usage": usage_of(choices)}

    def begin(self, choice: Choice) -> list[str]:
        return []

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        start = len(choice.token_ids) - len(chunk.token_ids) // 4
        content = self.part_choice(choice, chunk, start) | self._ending(choice, start)
        return [self._event([choice], [content])]

    def end(self, choices: list[Choice]) -> list[str]:
        usage = [self._event(choices, [], usage=usage_of(choices))] if self.body.includes_usage else []
        return [*usage, "data: [DONE]\n\n"]

    def failed(self, error: PenstockError) -> list[str]:
        return [f"data: {json.dumps({'error': openai_error(error)})}\n\n", "data: [DONE]\n\n"]

    def _ending(self, choice: Choice, start: int) -> Json:
        log_probs = self.log_probs(choice, start, len(choice.token_ids)) if self.with_log_probs else None
        return {"index": choice.index, "finish_reason": finish_reason(choice), "logprobs": log_probs}

    def _event(self, choices: list[Choice], listed: list[Json], **further: Any) -> str:
        content = self._envelope(self.chunk_kind, choices) | {"choices": listed} | further
        return f"data: {json.dumps(content)}\n\n"

    def _envelope(self, kind: str, choices: list[Choice]) -> Json:
        """Fields that every answer has."""
        versions = version_fields(choices)
        newest = versions["policy_version"]
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": None if newest is None else f"policy-{newest}",
            **versions,
        }


class ChatExchange(OpenAIExchange):
    """One request of chat completions and its answer."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, texts: TokenTexts, session_id: str = "") -> None:
        super().__init__(body, texts, with_log_probs=bool(body.logprobs))
        if body.max_completion_tokens is not None:
            self.field_names["max_tokens"] = "max_completion_tokens"
        self.chat = body
        self.session_id = session_id
        self._begun: set[int] = set()

    def requests(self) -> list[generate_pb2.GenerateRequest]:
        body = self.chat
        limit = body.max_completion_tokens or body.max_tokens or UNLIMITED
        conversation = body.conversation()
        requests = [body.choice_request(index, self.session_id, limit) for index in range(body.n or 1)]
        for request in requests:
            conversation.fill(request)
            if body.response_format is not None:
                body.response_format.fill(request)
        return requests

    def whole_choice(self, choice: Choice) -> Json:
        message = choice.message
        content = message.content or (None if message.tool_calls else "")
        fields: Json = {"role": "assistant", "content": content, "refusal": None}
        if message.tool_calls:
            fields["tool_calls"] = [call.to_json() for call in message.tool_calls]
        return {"message": fields}

    def part_choice(self, choice: Choice, chunk: generate_pb2.GenerateChunk, start: int) -> Json:
        delta: Json = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta["role"] = "assistant"
        if chunk.text or not chunk.tool_calls:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = [_part_of_call(part) for part in chunk.tool_calls]
        return {"delta": delta}

    def log_probs(self, choice: Choice, start: int, end: int) -> Json:
        return {"content": token_log_probs(choice, start, end, self.texts), "refusal": None}


def token_log_probs(choice: Choice, start: int, end: int, texts: TokenTexts) -> list[Json]:
    """Log-probs of tokens [start, end). Only the sampled token's is known, so there are no alternatives."""
    tokens = texts(choice.token_ids[start:end])
    return [
        {"token": token, "logprob": log_prob, "bytes": _bytes_of(token), "top_logprobs": []}
        for token, log_prob in zip(tokens, choice.log_probs[start:end], strict=True)
    ]


def _bytes_of(token: str) -> list[int] | None:
    """The bytes of a token's text. Those of a token with a part of a character are not known here."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())


def finish_reason(choice: Choice) -> str | None:
    """OpenAI's reason; None while the answer goes on."""
    if not choice.finish_reason:
        return None
    if choice.is_cut:
        return "length"
    return "tool_calls" if choice.message.tool_calls else "stop"


def _part_of_call(part: generate_pb2.ToolCallPart) -> Json:
    function: Json = {"arguments": part.arguments}
    if not part.call_id:
        return {"index": part.index, "function": function}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": {"name": part.name, **function}}


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: str | list[TokenId]
    max_tokens: MaxTokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 give the log-prob of the sampled token; alternatives are not known."""
    echo: Annotated[Any, Refused("the client has the prompt", (False,))] = None
    best_of: Annotated[Any, Refused("use n", (1,))] = None
    suffix: Annotated[Any, Refused("models here write forwards", ("",))] = None


class CompletionExchange(OpenAIExchange):
    """One request of completions and its answer."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, texts: TokenTexts, session_id: str = "") -> None:
        super().__init__(body, texts, with_log_probs=body.logprobs is not None)
        self.completion = body
        self.session_id = session_id

    def requests(self) -> list[generate_pb2.GenerateRequest]:
        body = self.completion
        if not body.prompt:
            raise InvalidInput("prompt", "must not be empty")
        if body.chat_template_kwargs:
            raise InvalidInput("chat_template_kwargs", "has no effect on plain text; leave it out")
        limit = body.max_tokens or UNLIMITED
        requests = [body.choice_request(index, self.session_id, limit) for index in range(body.n or 1)]
        for request in requests:
            if isinstance(body.prompt, str):
                request.text = body.prompt
            else:
                request.token_ids = np.asarray(body.prompt, dtype="<i4").tobytes()
        return requests

    def whole_choice(self, choice: Choice) -> Json:
        return {"text": choice.message.content}

    def part_choice(self, choice: Choice, chunk: generate_pb2.GenerateChunk, start: int) -> Json:
        return {"text": chunk.text}

    def log_probs(self, choice: Choice, start: int, end: int) -> Json:
        tokens = self.texts(choice.token_ids[start:end])
        log_probs = choice.log_probs[start:end]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": []}
