"""Anthropic's Messages with its official client: tools, streams, stop sequences, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.protocol_run import MAX_MODEL_LEN, ProtocolRun

if TYPE_CHECKING:  # the import takes seconds in every process that collects tests
    import anthropic

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
QUESTION: Any = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
OPTIONS: Any = {"model": "test", "max_tokens": 400, "messages": QUESTION, "system": "be brief"}


@pytest.fixture(scope="module")
def client(served_run: ProtocolRun) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=served_run.url, api_key=served_run.key, max_retries=0) as made:
        yield made


def test_text_is_answered_and_cut(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**OPTIONS | {"max_tokens": 5})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 5)
    [block] = answer.content
    assert block.type == "text" and (answer.model_extra or {})["policy_version"] == 3
    counted = client.messages.count_tokens(model="test", messages=QUESTION, system="be brief")
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        **OPTIONS, tools=[ADD], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    [use] = answer.content
    assert answer.stop_reason == "tool_use" and use.type == "tool_use"
    assert use.name == "add" and isinstance(use.input, dict) and use.input.keys() == {"a"}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "4"}]}
    history: Any = [*QUESTION, {"role": "assistant", "content": answer.content}, result]
    again = client.messages.create(**OPTIONS | {"messages": history, "max_tokens": 4}, tools=[ADD])
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_a_stream_adds_up_to_a_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        **OPTIONS, tools=[ADD, ADD | {"name": "sub"}], tool_choice={"type": "tool", "name": "sub"}
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "input_json" in kinds
    assert {block.type for block in message.content} == {"tool_use"} and message.stop_reason == "tool_use"
    assert all(block.name == "sub" and "a" in block.input for block in message.content)  # type: ignore[union-attr]
    with client.messages.stream(**OPTIONS | {"max_tokens": 9}) as stream:
        assert "".join(stream.text_stream) == stream.get_final_text()


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    letters = [*"abcdefghijklmnopqrstuvwxyz"][:4]
    answer = client.messages.create(**OPTIONS, stop_sequences=letters)
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence in letters
    assert not set(letters) & set(answer.content[0].text)  # type: ignore[union-attr]


def test_output_fits_a_json_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = client.messages.create(**OPTIONS, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert answer.content[0].text in ('{"ok": true}', '{"ok": false}')  # type: ignore[union-attr]


def test_what_cannot_be_honoured_is_refused_by_name(client: anthropic.Anthropic, served_run: ProtocolRun) -> None:
    import anthropic

    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    for field, options in (
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [image]}]}),
        ("output_config.effort", {"output_config": {"effort": "low"}}),
        ("container", {"extra_body": {"container": "c"}}),
        ("top_j", {"extra_body": {"top_j": 1}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("max_tokens", {"max_tokens": MAX_MODEL_LEN + 1}),
        ("messages[1].role", {"messages": [*QUESTION, {"role": "assistant", "content": "The sum is"}]}),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**OPTIONS | options)
        body: Any = refused.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error", body
        assert body["field"] == field and body["error"]["message"].startswith(field), body
    with (
        anthropic.Anthropic(base_url=served_run.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        other.messages.create(**OPTIONS)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**OPTIONS | {"model": "claude"})
