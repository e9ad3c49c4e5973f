"""Tools are Python classes that the model calls. The YAML file `rollout.agents.tools_file` declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidInput

ToolAnswer = tuple[str, float, dict[str, float]]
"""Text for the model, reward of the call, and numbers to record."""

SET_TOOLS = "set rollout.agents.tools, mcp_servers or tools_file"


class ToolError(Exception):
    """A call failed. The model reads the message as the result; other exceptions are shown with their type."""


class Tool:
    """Base class of tools. The methods are those of verl's BaseTool.

    One object serves all samples of a server. Each sample that calls the tool has its own instance, identified by
    `instance_id`. `create` runs before the sample's first call, and `calc_reward` after a sample that ended normally.
    `release` always runs, even after a cancellation. The calls of one turn run at the same time. Each call has the
    deadline `rollout.agents.tool_timeout_s`. All samples share one event loop, so run blocking code in
    `asyncio.to_thread`.

    The keyword arguments come from the prompt's `extra_info.tools_kwargs[name]`: `create_kwargs`, `execute_kwargs`,
    `calc_reward_kwargs` and `release_kwargs`.
    """

    timeout_s: float | None = None
    """Deadline of each call, in seconds. None for `rollout.agents.tool_timeout_s`."""
    takes_agent_data = False
    """Whether `execute` gets the state of the sample (`AgentData`) as `agent_data`, as verl's tools do."""

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any]) -> None:
        self.config = config
        self.tool_schema = tool_schema

    @property
    def name(self) -> str:
        name: str = self.tool_schema["function"]["name"]
        return name

    async def open(self) -> None:
        """Prepare the object itself, once, before the first sample. Raise ConfigError if it cannot work here."""

    async def close(self) -> None:
        """Free what `open` has taken. Called once, when the server ends."""

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Prepare an instance."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer | str:
        """Run one call. `parameters` are the model's, unchecked. The model sees an exception as the result."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """A reward for the whole sample, in addition to the rewards of its calls, or None."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the instance."""


def tools_kwargs(extra_info: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The prompt's arguments for tools. Nulls count as absent, because Parquet writes them for missing fields."""
    by_tool = extra_info.get("tools_kwargs") or {}
    if not isinstance(by_tool, dict):
        raise InvalidInput("extra_info.tools_kwargs", "must be an object: tool name to create_kwargs and so on")
    checked: dict[str, dict[str, dict[str, Any]]] = {}
    for name, calls in by_tool.items():
        if calls is None:
            continue
        if not isinstance(calls, dict) or not all(isinstance(kwargs, dict | None) for kwargs in calls.values()):
            raise InvalidInput(f"extra_info.tools_kwargs.{name}", "must be an object of objects, such as create_kwargs")
        checked[name] = {call: kwargs for call, kwargs in calls.items() if kwargs}
    return checked
