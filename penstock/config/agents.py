"""Configuration of agent loops and of how many groups a rollout server works on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config.base import Config


class AgentsConfig(Config):
    """Tools, interactions, custom agents, and the limits of multi-turn samples."""

    tools_file: Path | None = None
    """YAML file of the tools that `tool_agent` offers: class_name, config and tool_schema of each, as verl has it."""
    interactions_file: Path | None = None
    """YAML file of the interactions: name, class_name and config of each, as verl has it."""
    custom: dict[str, str] = {}
    """Further agents: name to `package.module:function` or `path/file.py:function`. Prompts choose by name."""
    tool_format: str = "hermes"
    """How the model writes tool calls: hermes, llama3_json, openai, or a parser of your own,
    `package.module:function` or `path/file.py:function`."""
    max_turns: int = Field(default=8, ge=1)
    """Assistant turns of one sample. A sample that would go on ends with finish reason `length`."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one assistant turn. None: as many as the response has left."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Tool calls of one turn that are run; the model is told that further ones were not."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one tool call, and of each other call into a tool or an interaction."""
    max_tool_response_chars: int = Field(default=4096, ge=1)
    """A longer answer of a tool is cut, and says so."""
    tool_response_keep: Literal["head", "tail", "both"] = "head"
    """Which part of an answer that is too long the model sees."""
    scored_text: Literal["response", "last_turn"] = "response"
    """What the reward function is given: the whole response, tool output included, or the last assistant turn."""
    turn_rewards: Literal["sum", "replace", "last"] = "sum"
    """How rewards of tools and interactions meet the reward function's. `sum` adds all up. `replace` is their sum
    without the function's. `last` is the final one, or else the last turn's, alone."""


class AdaptiveConcurrencyConfig(Config):
    """Fewer groups at once while the engine cannot take what it has; `max_concurrent_groups` is never exceeded."""

    enabled: bool = True
    max_kv_usage: float = Field(default=0.95, gt=0, le=1)
    """Share of the KV cache above which waiting requests mean that it is full, and running ones are preempted."""
    max_queue_s: float = Field(default=5.0, gt=0)
    """More than half as many requests as run, waiting inside the engine for this long without a break, are too many."""
