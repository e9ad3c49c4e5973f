"""Configuration of agent loops, and of how many groups a rollout server works on at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config.base import Config


class AgentsConfig(Config):
    """Tools, interactions, custom agents, and the limits of multi-turn samples."""

    tools_file: Path | None = None
    """YAML file of the tools that `tool_agent` offers. Each entry has class_name, config and tool_schema, in verl's
    format. None: no tools."""
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
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one assistant turn. None: whatever the response's `max_tokens` has left."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Maximum number of tool calls that are executed in one turn. The model is told that further calls were not."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline, in seconds, of each call into a tool or an interaction."""
    max_tool_response_chars: int = Field(default=4096, ge=1)
    """Maximum length of a tool response in characters. A longer one is cut, with a note in the text."""
    tool_response_keep: Literal["head", "tail", "both"] = "head"
    """Part that is kept of a tool response that is too long: its start, its end, or both."""
    scored_text: Literal["response", "last_turn"] = "response"
    """Text that the reward function receives: the whole response including tool output, or only the last assistant
    turn."""
    turn_rewards: Literal["sum", "replace", "last"] = "sum"
    """How the rewards of tools and interactions are combined with the reward function's. `sum` adds all of them.
    `replace` adds the rewards of tools and interactions and ignores the function. `last` takes the final reward only,
    or the last turn's if there is no final one."""


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
