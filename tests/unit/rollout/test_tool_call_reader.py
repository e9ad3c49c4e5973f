"""Splitting an answer into content and tool calls while it grows."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from penstock.protocols.conversation import Conversation, Message
from penstock.v1 import generate_pb2
from penstock_rollout.agents.tool_calls import TOOL_FORMATS
from penstock_rollout.serving.tool_calling import SYNTAXES, FormatReader, constraint_of

TWO = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "<"}}\n</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
CASES = {
    "hermes": [
        ("I < you", "I < you", []),
        ("so: " + TWO, "so: ", [("f", {"a": "<"}), ("g", {})]),
        ("<tool_call>{broken}</tool_call> then", "<tool_call>{broken}</tool_call> then", []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("a <tool", "a <tool", []),
    ],
    "llama3_json": [
        ("plain {", "plain {", []),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", {"a": 1}), ("g", {})]),
        ('{"value": 3}', '{"value": 3}', []),
    ],
    "openai": [
        ('go {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}', "go ", [("f", {})]),
        ("a {b} c", "a {b} c", []),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_content_and_calls_are_the_same_however_the_text_is_cut(name: str) -> None:
    for text, content, calls in CASES[name]:
        for size in (1, 3, 7, len(text)):
            reader = FormatReader(TOOL_FORMATS[name], SYNTAXES[name])
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            read = [reader.add(piece, (), number == len(pieces) - 1) for number, piece in enumerate(pieces)]
            parts = [part for one in read for part in one.tool_calls]
            assert "".join(one.content for one in read) == content, (text, size)
            assert [(part.name, json.loads(part.arguments)) for part in parts] == calls, (text, size)
            assert [part.index for part in parts] == list(range(len(calls)))


def test_calls_are_passed_on_before_the_answer_ends() -> None:
    reader = FormatReader(TOOL_FORMATS["hermes"], SYNTAXES["hermes"])
    assert reader.add("so: <tool", (), is_last=False).content == "so: "
    [part] = reader.add('_call>{"name": "f", "arguments": {}}</tool_call>', (), is_last=False).tool_calls
    assert part.name == "f" and part.call_id.startswith("call_")


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
@pytest.mark.parametrize("name", SYNTAXES)
def test_constraints_let_exactly_the_calls_of_the_format_pass(name: str) -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts  # type: ignore[import-not-found]

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 0}}}
    conversation = Conversation((Message("user", "hi"),), tools=(tool,))

    def grammar(**fields: Any) -> Any:
        constraint = constraint_of(generate_pb2.GenerateRequest(**fields), conversation, SYNTAXES[name])
        assert constraint is not None
        return xgrammar.Grammar.from_structural_tag(constraint.text)

    one = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "llama3_json": '{"name": "f", "parameters": {}}',
        "openai": '{"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}',
    }[name]
    required = grammar(tool_choice=generate_pb2.TOOL_CHOICE_REQUIRED)
    assert accepts(required, one) and not accepts(required, "text") and not accepts(required, one.replace('"f"', '"g"'))
    assert [call.name for call in TOOL_FORMATS[name](one)] == ["f"]  # type: ignore[union-attr]
    optional = grammar(single_tool_call=True)
    assert accepts(optional, "text") and accepts(optional, one) and not accepts(optional, f"{one}\n{one}")
