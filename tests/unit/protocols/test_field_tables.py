"""Every field of the real SDKs is known: honoured, refused by name, or without effect."""

from __future__ import annotations

import runpy
import typing
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidInput
from penstock.protocols import anthropic, chat, responses
from penstock.protocols.bodies import Refused

ROOT = Path(__file__).parents[3]


def sdk_fields(params: Any) -> set[str]:
    kinds = typing.get_args(params) or (params,)
    return {name for kind in kinds for name in kind.__annotations__}


def test_every_field_of_the_sdks_is_declared() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    for body, params in (
        (chat.ChatBody, chat_create_params.CompletionCreateParams),
        (chat.CompletionBody, completion_create_params.CompletionCreateParams),
        (responses.ResponsesBody, response_create_params.ResponseCreateParams),
        (anthropic.MessagesBody, message_create_params.MessageCreateParams),
        (anthropic.CountBody, message_count_tokens_params.MessageCountTokensParams),
    ):
        known = sdk_fields(params)
        assert len(known) > 5 and known <= body.model_fields.keys(), sorted(known - body.model_fields.keys())


@pytest.mark.parametrize(
    "body",
    [
        chat.ChatBody(model="m", messages=[chat.ChatMessage(role="user", content="hi")]),
        chat.CompletionBody(model="m", prompt="hi"),
        responses.ResponsesBody(model="m", input="hi"),
        anthropic.MessagesBody(model="m", max_tokens=3, messages=[anthropic.InputMessage(role="user", content="hi")]),
    ],
    ids=lambda body: type(body).__name__,
)
def test_every_refused_field_is_refused_by_its_name_unless_it_is_neutral(body: Any) -> None:
    body.base_request("", max_tokens=3)
    fields = type(body).model_fields.items()
    marks = {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Refused)}
    assert marks
    for name, mark in marks.items():
        for value in (None, *mark.neutral):
            body.model_copy(update={name: value}).base_request("", max_tokens=3)
        with pytest.raises(InvalidInput) as refused:
            body.model_copy(update={name: "wanted"}).base_request("", max_tokens=3)
        assert refused.value.field == name and mark.why in str(refused.value)


def test_the_tables_are_up_to_date() -> None:
    built = runpy.run_path(str(ROOT / "docs" / "make_protocol_fields.py"))["build"]()
    assert (ROOT / "docs" / "protocols.md").read_text() == built, "run: python docs/make_protocol_fields.py"
