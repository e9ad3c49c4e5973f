"""The tools of MCP servers, as tools of an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.tools import McpServer
from penstock.errors import ConfigError
from penstock_rollout.agents.mcp.connection import McpConnection
from penstock_rollout.agents.tools import Tool, ToolAnswer, ToolError


class McpTool(Tool):
    """One tool of a server. All samples share the server, so a server that keeps state keeps it for all of them."""

    def __init__(self, connection: McpConnection, described: Any) -> None:
        settings = connection.settings
        function = {
            "name": settings.prefix + described.name,
            "description": described.description or "",
            "parameters": described.input_schema,
        }
        super().__init__({}, {"type": "function", "function": function})
        self.timeout_s = settings.max_wait_s + settings.timeout_s
        self._connection = connection
        self._remote_name: str = described.name

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        result = await self._connection.call(self._remote_name, parameters)
        text = result_text(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed")
        return text, 0.0, {"calls": 1.0}


@dataclass(frozen=True)
class McpServers:
    """Servers that are opened together, and the choice of tools among all that they offer."""

    connections: tuple[McpConnection, ...]
    selected: list[str] | None = None
    """Names of the tools to offer. None: all."""
    place: str = ""
    """Where `selected` is declared, for error messages."""

    async def open(self) -> list[tuple[McpTool, str]]:
        """Connect to all. Returns their tools, each with the place of its server. Raises ConfigError."""
        found = [(tool, server.place) for server in self.connections for tool in await _open_server(server)]
        if self.selected is None:
            return found
        names = [tool.name for tool, _ in found]
        if missing := sorted(set(self.selected) - set(names)):
            raise ConfigError(f"{self.place}: no server has a tool {missing[0]!r}; there are: {', '.join(names)}")
        return [(tool, place) for tool, place in found if tool.name in self.selected]


async def _open_server(connection: McpConnection) -> list[McpTool]:
    """Connect, and return the tools that the settings select. Raises ConfigError."""
    offered = {described.name: described for described in await connection.open()}
    wanted = connection.settings.tools
    where = connection.place
    if missing := sorted(set(wanted or ()) - set(offered)):
        known = ", ".join(offered) or "none"
        raise ConfigError(f"{where}.tools: the server has no tool {missing[0]!r}; it has: {known}")
    if not offered:
        raise ConfigError(f"{where}: the server offers no tools; remove it")
    return [McpTool(connection, offered[name]) for name in (offered if wanted is None else wanted)]


def configured_servers(servers: Mapping[str, McpServer]) -> McpServers:
    """The servers of `rollout.agents.mcp_servers`."""
    where = "rollout.agents.mcp_servers"
    return McpServers(tuple(McpConnection(name, server, f"{where}.{name}") for name, server in servers.items()))


def result_text(result: Any) -> str:
    """The texts of a result. What cannot be shown to the model is named; a result without texts is shown as JSON."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(text if text is not None else f"({block.type}, which cannot be shown)")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
