"""OpenAI's completions of plain text."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from penstock.errors import InvalidInput
from penstock.protocols.answers import Choice, TokenTexts
from penstock.protocols.bodies import UNLIMITED, MaxTokens, Refused, TokenId
from penstock.protocols.chat import OpenAIBody, OpenAIExchange
from penstock.protocols.conversation import Json
from penstock.v1 import generate_pb2


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
