"""What the bodies of all protocols share: how fields are refused by name, sampling options, texts and JSON.

Every field that a protocol has is declared, in one of three ways. A plain field is honoured. A field with `Refused` is
refused by its name, unless it has a value that changes nothing. A field with `NoEffect` changes nothing of the answer.
Fields that are not declared are refused as unknown. `docs/protocols.md` is made from these declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.api.conversion import json_text
from penstock.codec import sampling_to_proto
from penstock.errors import InvalidInput, ModelNotFound
from penstock.protocols.conversation import Conversation, Json, Message
from penstock.sampling import SAMPLING_FIELDS, Sampling
from penstock.v1 import generate_pb2

MAX_CHOICES = 128
UNLIMITED = 2**31 - 1
"""`max_tokens` of a request that has none: the answer may fill the model's context."""
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Refused:
    """Marks a field that is refused."""

    why: str
    """Ends the sentence "FIELD: is not supported: …"."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing and are accepted. Null is always one."""


@dataclass(frozen=True)
class NoEffect:
    """Marks a field that is accepted and changes nothing of the answer."""

    why: str


class Body(BaseModel):
    """A request of a protocol, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def refuse(self, path: str = "") -> None:
        """Raise InvalidInput for the first field that is refused. `path` is put before its name."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for mark in field.metadata:
                if isinstance(mark, Refused) and value is not None and value not in mark.neutral:
                    raise InvalidInput(f"{path}{name}", f"is not supported: {mark.why}; omit it")


Penalty = Annotated[Any, Refused("log-probs are those of the model itself", (0,))]
Identifier = Annotated[Any, NoEffect("the gateway knows its callers by their keys")]
Cache = Annotated[Any, NoEffect("prefixes are cached by themselves")]


class SamplingBody(Body):
    """Fields that the generating routes of all protocols have."""

    model: str
    """`RUN` is any version of the run, `RUN@7` only version 7."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Sample from this many of the most likely tokens, as in vLLM's server. -1 and 0 turn it off."""
    min_p: float | None = None
    """Sample from tokens that are at least this likely, compared with the most likely one, as in vLLM's server."""
    ignore_eos: bool | None = None
    """Go on after a stop token, as in vLLM's server."""
    chat_template_kwargs: Json | None = None
    """Further arguments of the model's chat template, as in vLLM's server: `{"enable_thinking": false}`."""
    stream: bool | None = None

    def base_request(
        self, session_id: str, *, max_tokens: int, seed: int | None = None, stop: str | list[str] | None = None
    ) -> generate_pb2.GenerateRequest:
        """A request with everything but its prompt. Refuses what is not supported."""
        self.refuse()
        run, at, version = self.model.partition("@")
        if not run or (at and not (version.isdecimal() and len(version) < 19)):
            raise ModelNotFound(f"the model must be RUN or RUN@VERSION, not {self.model!r}")
        named = [name for name in SAMPLING_FIELDS if name in SamplingBody.model_fields]
        given = {name: value for name in named if (value := getattr(self, name)) is not None}
        given["top_k"] = max(0, self.top_k or 0)
        return generate_pb2.GenerateRequest(
            run=run,
            sampling=sampling_to_proto(Sampling(**given, max_tokens=max_tokens, seed=seed)),
            stop=[stop] if isinstance(stop, str) else stop or [],
            stream=bool(self.stream),
            session_id=session_id,
            policy_version=int(version) if at else None,
        )

    def to_conversation(
        self, messages: Iterable[Message], tools: Sequence[ToolBody], choice: tuple[generate_pb2.ToolChoice, str], *,
        is_single: bool,
    ) -> Conversation:  # fmt: skip
        """`choice` has the name of the tool if it names one, and `is_single` allows one call at most."""
        return Conversation(
            messages=tuple(messages),
            tools=tuple(tool.declared(f"tools[{number}]") for number, tool in enumerate(tools)),
            tool_choice=choice[0],
            tool_name=choice[1],
            single_tool_call=bool(tools) and is_single,
            template_arguments=self.chat_template_kwargs or {},
        )


class ToolBody(Body):
    """A function that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def declared(self, path: str) -> Json:
        """The tool in the form that chat templates read, without fields that have no value."""
        self.refuse(f"{path}.")
        json_text(self.parameters, f"{path}.parameters")
        fields = {name: getattr(self, name) for name in ToolBody.model_fields} | {"strict": self.strict or None}
        return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def text_of(content: Any, path: str) -> str:
    """The text of a message's content, or of a list of parts. Parts that are not text are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidInput(path, "must be text or a list of texts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidInput(f"{path}[{number}]", f"must be text, not {kind!r}; models here read text only")
        texts.append(part["text"])
    return "".join(texts)


def text_field(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{path}.{name}", "must be text")
    return value


def set_format(request: generate_pb2.GenerateRequest, kind: str, schema: Any, path: str) -> None:
    """Ask for an answer that is JSON, or JSON that fits a schema, which is at `path`."""
    if kind == "json_object":
        request.json_object = True
    elif kind == "json_schema":
        if not isinstance(schema, dict):
            raise InvalidInput(path, "must be a JSON schema, which is an object")
        request.json_schema = json_text(schema, path)
