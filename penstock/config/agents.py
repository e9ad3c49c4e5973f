"""Configuration of agent loops, and of how many groups a rollout server works on at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.base import Config
from penstock.config.tools import BuiltInTool, McpServer


class AgentsConfig(Config):
    """Tools, interactions, custom agents, and the limits of multi-turn samples."""

    default_agent: str = Field(default="single_turn_agent", min_length=1)
    """Agent of prompts without `agent_name`: a built-in one or one of `custom`."""
    tools_file: Path | None = None
    """YAML file of the tools that `tool_agent` offers. Each entry has class_name, config and tool_schema, in verl's
    format. None: no tools."""
    tools: dict[str, BuiltInTool] = {}
    """Built-in tools that `tool_agent` offers, by the name that the model calls: `{code_interpreter: {kind: python}}`.
    They are offered together with those of `tools_file`."""
    mcp_servers: dict[str, McpServer] = {}
    """MCP servers whose tools `tool_agent` offers too, by a name for messages."""
    interactions_file: Path | None = None
    """YAML file of the interactions. Each entry has name, class_name and config, in verl's format. None: no
    interactions."""
    custom: dict[str, str] = {}
    """Agents of your own: maps a name to `package.module:function` or `path/file.py:function`. A prompt selects its
    agent by this name."""
    tool_format: str = "hermes"
    """Format in which the model writes tool calls: `hermes`, `llama3_json`, `openai`, or a parser of your own as
    `package.module:function` or `path/file.py:function`."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of assistant turns in one sample. A sample that reaches it ends with finish reason `length`."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Maximum number of replies to the model in one sample: the results of the calls of one turn, or a reply of the
    interaction. The sample ends with the assistant turn after the last one. None: only `max_turns` limits them."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one assistant turn. None: whatever the response's `max_tokens` has left."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Maximum number of tool calls that are executed in one turn, all at the same time; verl's `max_parallel_calls`.
    The model is told that further calls were not executed."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline, in seconds, of each call into a tool or an interaction. Built-in tools have deadlines of their own."""
    tool_timeouts_s: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Deadlines, in seconds, of single tools, by their names. They replace `tool_timeout_s`."""
    max_tool_response_chars: int = Field(default=4096, ge=1)
    """Maximum length of a tool response in characters; verl's `max_tool_response_length`. A longer one is cut, with a
    note in the text."""
    tool_response_keep: Literal["head", "tail", "both"] = "head"
    """Part that is kept of a tool response that is too long: its start, its end, or both. verl's
    `tool_response_truncate_side` has other words for the same: `left` is `head`, `right` is `tail`, `middle` is
    `both`."""
    scored_text: Literal["response", "last_turn"] = "response"
    """Text that the reward function receives: the whole response including tool output, or only the last assistant
    turn."""
    turn_rewards: Literal["sum", "replace", "last", "record"] = "sum"
    """How the rewards of tools and interactions are combined with the reward function's. `sum` adds all of them.
    `replace` adds the rewards of tools and interactions and ignores the function. `last` takes the final reward only,
    or the last turn's if there is no final one. `record` changes nothing: the rewards are only kept in `reward_parts`,
    as in verl, where the reward function decides with `extra_info.tool_rewards` and `turn_scores`."""


class AdaptiveConcurrencyConfig(Config):
    """Lowers the number of concurrent groups while the engine is overloaded. It never exceeds
    `max_concurrent_groups`."""

    enabled: bool = True
    """False keeps `max_concurrent_groups` groups in progress at all times."""
    max_kv_usage: float = Field(default=0.95, gt=0, le=1)
    """The engine counts as overloaded while requests wait and more than this share of its KV cache is in use."""
    max_queue_s: float = Field(default=5.0, gt=0)
    """The engine also counts as overloaded when more than half as many requests wait as run, for this many seconds
    without a break."""
