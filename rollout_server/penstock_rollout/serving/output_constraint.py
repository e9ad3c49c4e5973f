"""The constraint of a generate request: a JSON schema for its text, and calls that are forced, strict or single.

A call is constrained in the format in which the model writes it, so that the tokens of a forced call are those that the
model would sample by itself. Structural tags have xgrammar's form, which vLLM takes unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidInput
from penstock.protocols.conversation import Conversation, Json
from penstock.v1 import generate_pb2
from penstock_rollout.engines.engine import OutputConstraint


@dataclass(frozen=True)
class CallSyntax:
    """How a tool format writes calls, around the JSON of their arguments."""

    begin: str
    """`%s` is the name of the tool as JSON text."""
    end: str
    separator: str
    trigger: str
    """The text that begins a call and nothing else."""
    before: str = ""
    after: str = ""
    """Text before the first and after the last call."""


SYNTAXES = {
    "hermes": CallSyntax(
        '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
    ),
    "llama3_json": CallSyntax('{"name": %s, "parameters": ', "}", separator="; ", trigger='{"name": "'),
    "openai": CallSyntax(
        '{"type": "function", "function": {"name": %s, "arguments": ', "}}", separator=", ", trigger='{"tool_calls"',
        before='{"tool_calls": [', after="]}",
    ),
}  # fmt: skip


def constraint_of(
    request: generate_pb2.GenerateRequest, conversation: Conversation, syntax: CallSyntax | None
) -> OutputConstraint | None:
    """The constraint of a request, or None. `syntax` is None if calls of the server's format cannot be constrained."""
    wanted = request.WhichOneof("output_format")
    if not calls_are_constrained(request, conversation):
        if wanted == "json_schema":
            return OutputConstraint("json_schema", request.json_schema)
        return OutputConstraint("json_object") if wanted == "json_object" else None
    if syntax is None:
        raise InvalidInput("tool_choice", "calls cannot be forced in the tool format of this server; use auto")
    is_forced = _is_forced(request)
    tags = [_tag(tool["function"], syntax, is_forced=is_forced) for tool in _callable_tools(conversation)]
    calls = _calls(tags, syntax, is_single=request.single_tool_call)
    if is_forced:
        return _structural_tag(calls)
    if wanted is not None:
        schema = json.loads(request.json_schema) if wanted == "json_schema" else {"type": "object"}
        return _structural_tag({"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]})
    return _structural_tag(_optional_calls(tags, calls, syntax, is_single=request.single_tool_call))


def calls_are_constrained(request: generate_pb2.GenerateRequest, conversation: Conversation) -> bool:
    if not conversation.tools or request.tool_choice == generate_pb2.TOOL_CHOICE_NONE:
        return False
    is_strict = any(tool["function"].get("strict") for tool in conversation.tools)
    has_format = request.WhichOneof("output_format") is not None
    return _is_forced(request) or is_strict or request.single_tool_call or has_format


def _is_forced(request: generate_pb2.GenerateRequest) -> bool:
    return request.tool_choice in (generate_pb2.TOOL_CHOICE_REQUIRED, generate_pb2.TOOL_CHOICE_NAMED)


def _callable_tools(conversation: Conversation) -> Sequence[Json]:
    if conversation.tool_choice == generate_pb2.TOOL_CHOICE_NAMED:
        return [tool for tool in conversation.tools if tool["function"]["name"] == conversation.tool_name]
    return conversation.tools


def _tag(function: Json, syntax: CallSyntax, *, is_forced: bool) -> Json:
    """One call of a tool. Its arguments fit its schema if it is strict, or if the call is forced."""
    is_strict = function.get("strict") or is_forced
    schema: Any = function.get("parameters") if is_strict else None
    content = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
    return {
        "type": "tag",
        "begin": syntax.begin % json.dumps(function["name"]),
        "content": content,
        "end": syntax.end,
    }


def _calls(tags: list[Json], syntax: CallSyntax, *, is_single: bool) -> Json:
    """At least one call."""
    calls: Json = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if not syntax.before:
        return calls
    frame = [{"type": "const_string", "value": text} for text in (syntax.before, syntax.after)]
    return {"type": "sequence", "elements": [frame[0], calls, frame[1]]}


def _optional_calls(tags: list[Json], calls: Json, syntax: CallSyntax, *, is_single: bool) -> Json:
    """Any text, and calls in it. After a single call the answer ends."""
    if syntax.before:  # all calls are one text
        begin, end = syntax.before, syntax.after
        inner = calls["elements"][1]
        tags = [{"type": "tag", "begin": begin, "content": inner, "end": end}]
    return {
        "type": "triggered_tags",
        "triggers": [syntax.trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": is_single,
    }


def _structural_tag(form: Json) -> OutputConstraint:
    return OutputConstraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
