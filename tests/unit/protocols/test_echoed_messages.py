"""Clients send answers back with fields of their own."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidInput
from penstock.protocols.chat import ChatMessage

ECHOED = {
    "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "images": None, "thinking_blocks": [], "reasoning_items": None, "provider_specific_fields": {"refusal": None},
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}, "index": 0,
         "provider_specific_fields": None},
    ],
}  # fmt: skip
"""An answer as the clients of OpenAI and litellm dump it."""


def test_an_answer_that_a_client_sends_back_is_read() -> None:
    message = ChatMessage.model_validate(ECHOED).message("messages[2]")
    assert (message.role, message.content, message.tool_calls[0].name) == ("assistant", "", "bash")


@pytest.mark.parametrize(
    ("name", "value"),
    [("images", ["cat.png"]), ("thinking_blocks", [{"thinking": "so"}]), ("reasoning_items", [{}]), ("refusal", "no")],
)
def test_what_would_be_lost_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"messages\[2\]\.{name}"):
        ChatMessage.model_validate(ECHOED | {name: value}).message("messages[2]")
