"""Parsers find the tool calls in the text of a turn."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock_rollout.agents.tool_calls import (
    TOOL_FORMATS,
    MalformedCall,
    ToolCall,
    find_explanation,
    find_parser,
    parse_hermes,
    parse_llama3_json,
    parse_openai,
)

ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("just words", []),
        ('I think <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ADD]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and <tool_call>{"name": "now"}</tool_call>',
            [ADD, ToolCall("now", {})],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ADD]),
    ],
)
def test_hermes(text: str, calls: list[ToolCall]) -> None:
    assert parse_hermes(text) == calls


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{name: add}</tool_call>", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
    ],
)
def test_malformed_hermes_says_why(text: str, why: str) -> None:
    (call,) = parse_hermes(text)
    assert isinstance(call, MalformedCall)
    assert why in call.why


def test_a_malformed_call_does_not_affect_the_others() -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first, second, third = parse_hermes(f"{good}<tool_call>{{</tool_call>{good}")
    assert (first, third) == (ADD, ADD)
    assert isinstance(second, MalformedCall)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', [ADD, ToolCall("now", {})]),
        ("The answer is {1}", []),
        ('{"answer": 3}', []),
        ("{1, 2}", []),
    ],
)
def test_llama3_json(text: str, calls: list[ToolCall]) -> None:
    assert parse_llama3_json(text) == calls


@pytest.mark.parametrize("text", ['{"name": "add", "parameters": {', "<|python_tag|>print(1)", "<|python_tag|>{1}"])
def test_malformed_llama3_json(text: str) -> None:
    (call,) = parse_llama3_json(text)
    assert isinstance(call, MalformedCall)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '{"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}',
            [ADD],
        ),
        ('Let me see. {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}', [ADD]),
        ('{"answer": 3}', []),
    ],
)
def test_openai(text: str, calls: list[ToolCall]) -> None:
    assert parse_openai(text) == calls


@pytest.mark.parametrize("text", ['{"tool_calls": [', '{"tool_calls": 3}', '{"tool_calls": [{"name": "add"}]}'])
def test_malformed_openai(text: str) -> None:
    assert [type(call) for call in parse_openai(text)] == [MalformedCall]


def test_a_parser_by_import_path() -> None:
    assert find_parser("penstock_rollout.agents.tool_calls:parse_openai") is parse_openai


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        find_parser("hermess")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_explains_a_format_has_a_call_that_its_parser_finds(name: str) -> None:
    text = find_explanation(name, "")([{"type": "function", "function": {"name": "add"}}])
    assert '{"type": "function", "function": {"name": "add"}}' in text
    example = text.partition("</tools>")[2].partition("\n")[2].partition("\n")[2].partition("\nwith")[0]
    assert TOOL_FORMATS[name](example) == [ToolCall("NAME", {"PARAMETER": "VALUE"})]


@pytest.mark.parametrize(("tool_format", "tool_parser"), [("mine:parse", ""), ("hermes", "qwen3_coder")])
def test_a_format_that_cannot_be_explained_is_refused(tool_format: str, tool_parser: str) -> None:
    with pytest.raises(ConfigError, match=f"in the format {tool_parser or tool_format}; set tool_format to one of"):
        find_explanation(tool_format, tool_parser)
    find_explanation("hermes", "hermes")
