"""OpenAI's Responses with its official client: tools, streams, JSON schemas, refusals."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest

from support.protocol_run import MAX_MODEL_LEN

ADD: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
OPTIONS: Any = {"model": "test", "input": "2+2?", "instructions": "be brief"}


class Verdict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    value: Literal["yes", "no"]


def test_text_with_log_probs_is_answered_and_cut(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.create(
        **OPTIONS, max_output_tokens=6, include=["message.output_text.logprobs"], metadata={"a": "b"}
    )
    assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 6
    [item] = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    assert len(item.content[0].logprobs or ()) == 6
    assert answer.metadata == {"a": "b"} and (answer.model_extra or {})["policy_version"] == 3


def test_a_call_and_its_output(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.create(
        **OPTIONS, tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_output_tokens=400
    )
    [call] = answer.output
    assert call.type == "function_call" and call.name == "add" and '"a"' in call.arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}
    history: Any = [question, call.to_dict(), output]
    again = openai_client.responses.create(model="test", input=history, tools=[ADD], max_output_tokens=3)
    assert again.usage is not None and answer.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_streams_add_up_to_whole_answers(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(
        **OPTIONS, tools=[ADD], tool_choice={"type": "function", "name": "add"}
    ) as calls:
        kinds = [event.type for event in calls]
        final = calls.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert {item.type for item in final.output} == {"function_call"}
    events: Any = list(openai_client.responses.create(**OPTIONS, max_output_tokens=12, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_text_fits_a_json_schema(openai_client: openai.OpenAI) -> None:
    parsed = openai_client.responses.parse(**OPTIONS, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)


def test_what_cannot_be_honoured_is_refused_by_name(openai_client: openai.OpenAI) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("reasoning", {"reasoning": {"effort": "low"}}),
        ("truncation", {"truncation": "auto"}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("include[0]", {"include": ["file_search_call.results"]}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("max_output_tokens", {"max_output_tokens": MAX_MODEL_LEN + 1}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "what"}}}}),
    ]
    for field, options in refused:
        with pytest.raises(openai.BadRequestError) as wrong:
            openai_client.responses.create(**OPTIONS | options)
        assert wrong.value.param == field, (wrong.value.param, wrong.value.message)
