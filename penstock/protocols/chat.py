"""OpenAI's chat completions, and its completions of plain text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from penstock.errors import InvalidInput, PenstockError
from penstock.protocols.answers import Choice, Exchange, TokenTexts, openai_error, sse, version_fields
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
    ToolBody,
    set_format,
    text_of,
)
from penstock.protocols.conversation import Json, Message, ToolUse
from penstock.v1 import generate_pb2

DONE = "data: [DONE]\n\n"
TEXT_ONLY = Annotated[Any, Refused("models here read and write text only")]
TOOL_CHOICES = {
    "auto": generate_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": generate_pb2.TOOL_CHOICE_NONE,
    "required": generate_pb2.TOOL_CHOICE_REQUIRED,
}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, NoEffect("events are not padded")] = None


class OpenAIFields(SamplingBody):
    """Fields that all of OpenAI's protocols share."""

    stream_options: StreamOptions | None = None
    store: Annotated[Any, NoEffect("nothing is stored")] = None
    user: Identifier = None
    safety_identifier: Identifier = None
    service_tier: Annotated[Any, NoEffect("there is one tier")] = None
    prompt_cache_key: Cache = None
    prompt_cache_options: Cache = None
    prompt_cache_retention: Cache = None


class OpenAIBody(OpenAIFields):
    """Fields that chat completions and completions share."""

    max_tokens: MaxTokens | None = None
    seed: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[Any, Refused("log-probs are those of the model itself", ({},))] = None
    metadata: Annotated[Any, NoEffect("nothing is stored")] = None

    @property
    def token_limit(self) -> int:
        return self.max_tokens or UNLIMITED

    def requests(self, session_id: str) -> list[generate_pb2.GenerateRequest]:
        """A request for each choice. Raises InvalidInput for what cannot be honoured."""
        first = self.base_request(session_id, max_tokens=self.token_limit, seed=self.seed, stop=self.stop)
        self.fill(first)
        requests = [first]
        for index in range(1, self.n or 1):
            requests.append(generate_pb2.GenerateRequest())
            requests[-1].CopyFrom(first)
            if self.seed is not None:
                requests[-1].sampling.seed = min(self.seed + index, 2**63 - 1)
        return requests

    def fill(self, request: generate_pb2.GenerateRequest) -> None:
        """Write the prompt into a request."""
        raise NotImplementedError


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
            ToolUse(call.id, call.function.name, call.function.arguments or "{}") for call in self.tool_calls or ()
        )
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=text_of(self.content, f"{path}.content"),
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            reasoning=self.reasoning_content or "",
        )


class TypedTool(Body):
    type: Literal["function"]


class ChatTool(TypedTool):
    function: ToolBody


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    top_logprobs: Annotated[Any, Refused("only the sampled token's is known", (0,))] = None
    functions: Annotated[Any, Refused("use tools", ([],))] = None
    function_call: Annotated[Any, Refused("use tool_choice", ("none", "auto"))] = None
    modalities: Annotated[Any, Refused("models here read and write text only", (["text"],))] = None
    audio: TEXT_ONLY = None
    prediction: Annotated[Any, Refused("answers are sampled token by token")] = None
    reasoning_effort: Annotated[Any, Refused("set it by chat_template_kwargs, if the template has it")] = None
    verbosity: Annotated[Any, Refused("models here have no such setting")] = None
    web_search_options: Annotated[Any, Refused("give a tool that searches")] = None
    moderation: Annotated[Any, Refused("answers are not moderated")] = None

    @property
    def token_limit(self) -> int:
        return self.max_completion_tokens or super().token_limit

    def fill(self, request: generate_pb2.GenerateRequest) -> None:
        messages = [message.message(f"messages[{number}]") for number, message in enumerate(self.messages)]
        tools, choice = [tool.function for tool in self.tools or ()], chosen_tool(self.tool_choice)
        self.to_conversation(messages, tools, choice, is_single=self.parallel_tool_calls is False).fill(request)
        if (form := self.response_format) is not None:
            schema = form.json_schema.schema_ if form.json_schema is not None else None
            set_format(request, form.type, schema, "response_format.json_schema.schema")


def chosen_tool(choice: str | Json | None) -> tuple[generate_pb2.ToolChoice, str]:
    """OpenAI's `tool_choice` as ours, with the name of the tool if it names one."""
    if choice is None or (isinstance(choice, str) and choice in TOOL_CHOICES):
        return TOOL_CHOICES[choice or "auto"], ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return generate_pb2.TOOL_CHOICE_NAMED, function["name"]
    raise InvalidInput("tool_choice", "must be auto, none, required, or a function with its name")


class ChatExchange(Exchange):
    """The answer to a request of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, body: OpenAIBody, texts: TokenTexts) -> None:
        super().__init__(body, texts)
        self._begun: set[int] = set()
        if getattr(body, "max_completion_tokens", None) is not None:
            self.field_names["max_tokens"] = "max_completion_tokens"

    def whole_choice(self, choice: Choice) -> Json:
        message = choice.message
        content = message.content or (None if message.tool_calls else "")
        fields: Json = {"role": "assistant", "content": content, "refusal": None}
        if message.tool_calls:
            fields["tool_calls"] = [call.to_json() for call in message.tool_calls]
        return {"message": fields}

    def part_choice(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> Json:
        delta: Json = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta["role"] = "assistant"
        if chunk.text or not chunk.tool_calls:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = [_part_of_call(part) for part in chunk.tool_calls]
        return {"delta": delta}

    def log_probs(self, choice: Choice, start: int) -> Json | None:
        if not self.body.logprobs:
            return None
        return {"content": token_log_probs(choice, start, len(choice.token_ids), self.texts), "refusal": None}

    def whole(self, choices: list[Choice]) -> Json:
        listed = [self.whole_choice(choice) | self._ending(choice, 0) for choice in choices]
        return self._envelope(self.kind, choices) | {"choices": listed, "usage": _usage(choices)}

    def part(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> list[str]:
        return [self._event([choice], [self.part_choice(choice, chunk) | self._ending(choice, choice.num_before)])]

    def end(self, choices: list[Choice]) -> list[str]:
        options = self.body.stream_options
        is_wanted = options is not None and options.include_usage
        return [*([self._event(choices, [], usage=_usage(choices))] if is_wanted else []), DONE]

    def failed(self, error: PenstockError) -> list[str]:
        return [sse({"error": openai_error(error)}), DONE]

    def _ending(self, choice: Choice, start: int) -> Json:
        reason = "stop" if choice.ending == "stop_text" else choice.ending
        return {"index": choice.index, "finish_reason": reason, "logprobs": self.log_probs(choice, start)}

    def _event(self, choices: list[Choice], listed: list[Json], **further: Any) -> str:
        return sse(self._envelope(self.chunk_kind, choices) | {"choices": listed} | further)

    def _envelope(self, kind: str, choices: list[Choice]) -> Json:
        """Fields that every answer has."""
        versions = version_fields(choices)
        newest = versions["policy_version"]
        fingerprint = None if newest is None else f"policy-{newest}"
        return {
            "id": self.answer_id, "object": kind, "created": self.created, "model": self.body.model,
            "system_fingerprint": fingerprint, **versions,
        }  # fmt: skip


def _usage(choices: list[Choice]) -> Json:
    prompt, completion = choices[0].num_prompt_tokens, sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_log_probs(choice: Choice, start: int, end: int, texts: TokenTexts) -> list[Json]:
    """Log-probs of tokens [start, end). Only the sampled token's is known, so there are no alternatives."""
    rows: list[Json] = []
    for token, log_prob in zip(texts(choice.token_ids[start:end]), choice.log_probs[start:end], strict=True):
        # The bytes of a token with a part of a character are not known here.
        known = None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())
        rows.append({"token": token, "logprob": log_prob, "bytes": known, "top_logprobs": []})
    return rows


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

    def fill(self, request: generate_pb2.GenerateRequest) -> None:
        if not self.prompt:
            raise InvalidInput("prompt", "must not be empty")
        if self.chat_template_kwargs:
            raise InvalidInput("chat_template_kwargs", "has no effect on plain text; omit it")
        if isinstance(self.prompt, str):
            request.text = self.prompt
        else:
            request.token_ids = np.asarray(self.prompt, dtype="<i4").tobytes()


class CompletionExchange(ChatExchange):
    """The answer to a request of completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def whole_choice(self, choice: Choice) -> Json:
        return {"text": choice.message.content}

    def part_choice(self, choice: Choice, chunk: generate_pb2.GenerateChunk) -> Json:
        return {"text": chunk.text}

    def log_probs(self, choice: Choice, start: int) -> Json | None:
        if self.body.logprobs is None:
            return None
        tokens, log_probs = self.texts(choice.token_ids[start:]), choice.log_probs[start:]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": []}
