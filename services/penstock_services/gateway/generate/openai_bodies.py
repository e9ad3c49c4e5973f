"""JSON of the OpenAI-compatible routes.

Unknown keys are ignored, as OpenAI's clients expect. Options that would change the answer and are not supported are
refused.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock.errors import InvalidInput
from penstock.v1 import generate_pb2, groups_pb2, prompts_pb2
from penstock_services.gateway.bodies import Int64, Json, TokenId

MAX_CHOICES = 128
_FINISH = {groups_pb2.Trajectory.STOP: "stop", groups_pb2.Trajectory.LENGTH: "length"}
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


class OpenAIBody(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: MaxTokens | None = None
    seed: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def to_proto(self, index: int, session_id: str) -> generate_pb2.GenerateRequest:
        """The request for choice `index`. Subclasses add the messages or the text."""
        if session_id and (self.n or 1) > 1:
            raise InvalidInput("n", "must be 1 in a session, because the conversation continues with one answer")
        run, version = self._model()
        return generate_pb2.GenerateRequest(
            run=run,
            sampling=prompts_pb2.Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                max_tokens=self._max_tokens(),
                seed=None if self.seed is None else min(self.seed + index, 2**63 - 1),
            ),
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stream=bool(self.stream),
            session_id=session_id,
            policy_version=version,
        )

    @property
    def run(self) -> str:
        return self._model()[0]

    def _model(self) -> tuple[str, int | None]:
        """The run and the version of the model: `RUN` is any version, `RUN@7` only version 7."""
        name, at, version = self.model.partition("@")
        if not name or (at and not (version.isdecimal() and len(version) < 19)):
            raise InvalidInput("model", f"must be RUN or RUN@VERSION, not {self.model!r}")
        return name, int(version) if at else None

    def _max_tokens(self) -> int:
        return self.max_tokens or 2**31 - 1


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str | list[TextPart] | None = None


class ChatBody(OpenAIBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def to_proto(self, index: int, session_id: str) -> generate_pb2.GenerateRequest:
        if self.tools:
            raise InvalidInput("tools", "are not supported here; submit a prompt with an agent that has tools")
        if self.response_format and self.response_format.get("type") != "text":
            raise InvalidInput("response_format", "must be text")
        request = super().to_proto(index, session_id)
        request.messages.extend(prompts_pb2.Message(role=m.role, content=_content(m.content)) for m in self.messages)
        return request

    def _max_tokens(self) -> int:
        return self.max_completion_tokens or super()._max_tokens()


class CompletionBody(OpenAIBody):
    prompt: str | list[TokenId]
    max_tokens: MaxTokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: bool | None = None

    def to_proto(self, index: int, session_id: str) -> generate_pb2.GenerateRequest:
        if self.echo:
            raise InvalidInput("echo", "is not supported")
        if not self.prompt:
            raise InvalidInput("prompt", "must not be empty")
        request = super().to_proto(index, session_id)
        if isinstance(self.prompt, str):
            request.text = self.prompt
        else:
            request.token_ids = np.asarray(self.prompt, dtype="<i4").tobytes()
        return request


class RewardBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: float
    reward_parts: dict[str, float] = {}
    run: str = ""
    """The run of the session's calls; empty: the gateway's own."""


class Choice:
    """One answer, collected chunk by chunk."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: set[int] = set()
        self.num_prompt_tokens = 0
        self.finish_reason: str | None = None

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        self.text += chunk.text
        self.token_ids += np.frombuffer(chunk.token_ids, dtype="<i4").tolist()
        self.log_probs += np.frombuffer(chunk.log_probs, dtype="<f4").tolist()
        self.versions |= {segment.policy_version for segment in chunk.segments}
        self.num_prompt_tokens = self.num_prompt_tokens or len(chunk.prompt_token_ids) // 4
        if chunk.finish_reason:
            self.finish_reason = _FINISH.get(chunk.finish_reason, "stop")


def envelope(kind: str, answer_id: str, model: str, choices: list[Choice]) -> Json:
    """Fields that every answer has. `policy_version` is the newest version that produced a token of it."""
    versions = sorted(set().union(*(choice.versions for choice in choices)))
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"policy-{versions[-1]}" if versions else None,
        "policy_version": versions[-1] if versions else None,
        "policy_versions": versions,
    }


def usage_of(choices: list[Choice]) -> Json:
    prompt, completion = choices[0].num_prompt_tokens, sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def log_probs_of(choice: Choice, start: int, tokens: list[str]) -> Json:
    """Log-probs in the form of a chat completion. Only the sampled token's is known, so there are no alternatives."""
    entries = [
        {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, log_prob in zip(tokens, choice.log_probs[start:], strict=True)
    ]
    return {"content": entries, "refusal": None}


def _content(content: str | list[TextPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""
