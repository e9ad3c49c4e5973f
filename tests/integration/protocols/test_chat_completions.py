"""Chat completions with the official OpenAI client: tools, JSON schemas, streams, several choices, refusals."""

from __future__ import annotations

import json
from typing import Annotated, Any

import openai
import pydantic
import pytest

from support.protocol_run import MAX_MODEL_LEN

QUESTION: Any = [{"role": "user", "content": "2+2?"}]
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
END: Any = {"type": "function", "function": {"name": "end", "parameters": {"type": "object", "maxProperties": 0}}}


class Sum(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    value: bool
    unit: Annotated[str, pydantic.Field(max_length=3)]


def test_a_required_call_fits_the_schema_of_its_tool(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="test", messages=QUESTION, tools=[ADD, END], tool_choice="required", seed=1, max_tokens=500
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    calls: Any = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls) >= 1
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == ({"a", "b"} if call.function.name == "add" else set())


def test_a_named_call_is_of_that_tool_and_its_result_can_be_sent_back(openai_client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    answer = openai_client.chat.completions.create(
        model="test", messages=QUESTION, tools=[ADD, END], tool_choice=named, parallel_tool_calls=False, seed=2
    )
    message = answer.choices[0].message
    [call] = message.tool_calls or ()
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall) and call.function.name == "add"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    again = openai_client.chat.completions.create(
        model="test", messages=[*QUESTION, message, result], tools=[ADD, END], tool_choice="none", max_tokens=8
    )
    assert again.choices[0].message.tool_calls is None
    assert answer.usage is not None and again.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_streamed_calls_add_up_to_whole_ones(openai_client: openai.OpenAI) -> None:
    options: Any = {"model": "test", "messages": QUESTION, "tools": [ADD], "tool_choice": "required", "seed": 3}
    whole: Any = openai_client.chat.completions.create(**options).choices[0].message.tool_calls
    with openai_client.chat.completions.stream(**options) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in whole
    ]


def test_text_fits_a_json_schema_also_with_tools(openai_client: openai.OpenAI) -> None:
    parsed = openai_client.chat.completions.parse(model="test", messages=QUESTION, response_format=Sum, seed=4)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": Sum.model_json_schema()}}
    for seed in range(2):
        answer = openai_client.chat.completions.create(
            model="test", messages=QUESTION, response_format=schema, tools=[END], seed=seed, logprobs=True
        )
        [choice] = answer.choices
        assert choice.message.tool_calls or Sum.model_validate_json(choice.message.content or "")
        assert choice.logprobs is not None and answer.usage is not None
        assert len(choice.logprobs.content or ()) == answer.usage.completion_tokens


def test_several_choices_are_streamed_at_the_same_time(openai_client: openai.OpenAI) -> None:
    options: Any = {"model": "test", "messages": QUESTION, "n": 3, "seed": 5, "max_tokens": 24, "logprobs": True}
    whole = openai_client.chat.completions.create(**options)
    texts, tokens, order = ["", "", ""], [0, 0, 0], []
    usage: Any = None
    for chunk in openai_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
            order.append(choice.index)
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) == 3
    assert sum(tokens) == usage.completion_tokens and order != sorted(order)


def test_what_cannot_be_honoured_is_refused_by_name(openai_client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    twice, unknown = [ADD, ADD], {"name": "x", "schema": {"type": "what"}}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("verbosity", {"verbosity": "low"}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [image]}]}),
        ("tools[1].name", {"tools": twice}),
        ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": unknown}}),
        ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}),
        ("top_j", {"extra_body": {"top_j": 1}}),
        ("max_tokens", {"max_tokens": MAX_MODEL_LEN + 1}),
        ("max_completion_tokens", {"max_completion_tokens": MAX_MODEL_LEN + 1}),
    ]  # fmt: skip
    for stream in (False, True):
        for field, options in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                openai_client.chat.completions.create(
                    **{"model": "test", "messages": QUESTION, "stream": stream} | options
                )
            assert refused.value.param == field, (refused.value.param, refused.value.message)


def test_an_answer_fills_the_context_unless_it_is_limited(openai_client: openai.OpenAI) -> None:
    """A limit that the prompt leaves no room for is cut, as by vLLM's own server."""
    options: Any = {"model": "test", "messages": QUESTION, "seed": 3, "extra_body": {"ignore_eos": True}}
    for limit in ({}, {"max_tokens": MAX_MODEL_LEN}):
        answer = openai_client.chat.completions.create(**options, **limit)
        assert answer.usage is not None and answer.usage.total_tokens == MAX_MODEL_LEN
        assert answer.choices[0].finish_reason == "length"
