"""Formats of tool calls: how each is parsed, from the text of a turn, and explained to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.user_code import hint_for_name, load_callable
from penstock_rollout.tokenization import Tokenization, ToolSchemas


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be parsed. The model gets `why` as the result."""

    why: str


ToolCallParser = Callable[[str], list[ToolCall | MalformedCall]]
"""Returns the calls of a turn in order. The text includes special tokens, except for a stop token at its end."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OPENAI = re.compile(r'\{\s*"tool_calls"\s*:')
PYTHON_TAG = "<|python_tag|>"


def parse_hermes(text: str) -> list[ToolCall | MalformedCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Qwen2.5, Qwen3, Hermes."""
    return [_decoded(body.strip(), "arguments") for body in _HERMES.findall(text)]


def parse_llama3_json(text: str) -> list[ToolCall | MalformedCall]:
    """`{"name": ..., "parameters": {...}}` as the whole turn, or several separated by semicolons: Llama 3.1 to 3.3."""
    tagged = text.lstrip().startswith(PYTHON_TAG)
    body = text.replace(PYTHON_TAG, "").strip()
    if not body.startswith("{"):
        return [MalformedCall(f"{PYTHON_TAG} is not followed by a JSON object")] if tagged else []
    calls: list[ToolCall | MalformedCall] = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            is_attempt = tagged or calls or re.match(r'\{\s*"(name|parameters)"', body)
            return [*calls, MalformedCall(f"not valid JSON: {error}")] if is_attempt else []
        if not isinstance(value, dict) or "name" not in value:
            return calls  # a JSON answer, not a call
        calls.append(_call(value, "parameters"))
        body = body[end:].lstrip("; \t\r\n")
    return calls


def parse_openai(text: str) -> list[ToolCall | MalformedCall]:
    """`{"tool_calls": [{"type": "function", "function": {"name": ..., "arguments": "{...}"}}]}`, after any text. This
    is the message object of OpenAI's API. `arguments` may be JSON text, as in that API, or an object."""
    found = _OPENAI.search(text)
    if not found:
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(text[found.start() :])
    except (ValueError, RecursionError) as error:
        return [MalformedCall(f"not valid JSON: {error}")]
    entries = value["tool_calls"]
    if not isinstance(entries, list):
        return [MalformedCall("tool_calls is not a list")]
    return [
        _call(entry["function"], "arguments")
        if isinstance(entry, dict) and isinstance(entry.get("function"), dict)
        else MalformedCall("an entry of tool_calls has no `function` object")
        for entry in entries
    ]


TOOL_FORMATS: dict[str, ToolCallParser] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "openai": parse_openai,
}


_EXPLAINED = {
    "hermes": 'write for each call\n<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>',
    "llama3_json": 'write nothing but\n{"name": "NAME", "parameters": {"PARAMETER": "VALUE"}}\nwith ; between calls',
    "openai": "end with\n"
    '{"tool_calls": [{"type": "function", "function": {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}}]}',
}


def find_explanation(tool_format: str, tool_parser: str) -> Callable[[ToolSchemas], str]:
    """What shows tools to the model and says how to call them, for `rollout.agents.show_tools: prompt`. Raises
    ConfigError if there is none for both formats."""
    if tool_format not in _EXPLAINED or tool_parser not in ("", tool_format):
        raise ConfigError(
            f"rollout.agents.show_tools: prompt cannot explain calls in the format {tool_parser or tool_format}; set "
            f"tool_format to one of {', '.join(_EXPLAINED)} and tool_parser to the same, or set own and describe the "
            "tools in your prompts"
        )

    def explain(schemas: ToolSchemas) -> str:
        listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            f"You can call these functions:\n<tools>\n{listed}\n</tools>\nTo call functions, {_EXPLAINED[tool_format]}"
        )

    return explain


def tokenization_of(config: RunConfig, fit: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple) -> Tokenization:
    """The tokenization of a run's rollout servers."""
    rollout, agents = config.rollout, config.rollout.agents
    is_explained = agents.show_tools == "prompt"
    explain = find_explanation(agents.tool_format, rollout.tool_parser) if is_explained else None
    return Tokenization(config.model.path, fit, rollout.prompt.template_arguments, explain)


def find_parser(name: str, where: str = "rollout.agents.tool_format") -> ToolCallParser:
    """Find a parser by the name of its format, or import it by path. `where` is the field of the config."""
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    if ":" in name:
        parser: ToolCallParser = load_callable(name, where)
        return parser
    hint = hint_for_name(name, TOOL_FORMATS, others=", or package.module:name")
    raise ConfigError(f"{where}: unknown format {name!r}; {hint}")


def _decoded(body: str, arguments_key: str) -> ToolCall | MalformedCall:
    try:
        return _call(json.loads(body), arguments_key)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"not valid JSON: {error}")


def _call(value: Any, arguments_key: str) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('a call needs a "name"')
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f'"{arguments_key}" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return MalformedCall(f'"{arguments_key}" must be a JSON object')
    return ToolCall(value["name"], arguments)
