"""MCP servers of tools files in verl's format: an entry with `config.type: mcp` and a JSON file of servers.

```yaml
- class_name: verl.tools.mcp_base_tool.MCPBaseTool
  config: {type: mcp, rate_limit: 120, timeout: 120}
  mcp: {mcp_servers_config_path: ./mcp_server.json, tool_selected_list: [search]}
```
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.config.base import Config
from penstock.config.explanation import explain
from penstock.config.tools import McpServer
from penstock.errors import ConfigError
from penstock_rollout.agents.declarations import McpDeclaration, ToolDeclaration
from penstock_rollout.agents.mcp.connection import McpConnection
from penstock_rollout.agents.mcp.tools import McpServers

logger = logging.getLogger(__name__)
_CLASSES = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")

_M = TypeVar("_M", bound=BaseModel)


class _McpConfig(Config):
    """`config` of verl's MCP tools."""

    type: Literal["mcp"]
    timeout: float = Field(default=30.0, gt=0)
    rate_limit: float | None = None


class _Server(BaseModel):
    """A server in the JSON file, in the format that most MCP clients share. Keys such as `description` are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: Path | None = None
    url: str | None = Field(default=None, pattern=r"^https?://")
    transport: str | None = None
    headers: dict[str, str] = {}
    auth_token: str | None = None

    @model_validator(mode="after")
    def _has_one_address(self) -> _Server:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either `command` or `url`")
        return self

    def settings(self, timeout_s: float) -> McpServer:
        if self.command is not None:
            command = [self.command, *self.args]
            return McpServer(command=command, env=self.env, folder=self.cwd, timeout_s=timeout_s)
        token = {"Authorization": f"Bearer {self.auth_token}"} if self.auth_token else {}
        return McpServer(
            url=self.url, transport=self._transport, headers={**self.headers, **token}, timeout_s=timeout_s
        )

    @property
    def _transport(self) -> Literal["streamable_http", "sse"]:
        """As verl chooses it: SSE with a token, else as the file or the address says."""
        is_sse = self.transport == "sse" or (self.transport is None and "/sse" in str(self.url))
        return "sse" if self.auth_token or is_sse else "streamable_http"


def mcp_servers_of(declared: ToolDeclaration, folder: Path, place: str) -> McpServers:
    """The servers of one entry. `folder` is that of the tools file. Raises ConfigError."""
    if declared.class_name.replace(":", ".") not in _CLASSES:
        raise ConfigError(
            f"{place}.class_name: {declared.class_name} cannot be used with MCP servers; take {_CLASSES[0]}, or "
            "write a tool that calls the server"
        )
    if declared.mcp is None:
        raise ConfigError(f"{place}.mcp is missing; give mcp_servers_config_path in it")
    config = _validated(_McpConfig, declared.config, f"{place}.config")
    if config.rate_limit is not None:
        logger.warning(
            "%s.config.rate_limit has no effect: 64 calls of a server may run at once; set max_concurrent in "
            "rollout.agents.mcp_servers instead", place,
        )  # fmt: skip
    file = _servers_path(declared.mcp, folder)
    where = f"{place}.mcp.mcp_servers_config_path {file}"
    connections = []
    for name, data in _read(file, where).items():
        server = _validated(_Server, data, f"{where}: {name}")
        connections.append(McpConnection(name, server.settings(config.timeout), f"{where}: {name}"))
    return McpServers(tuple(connections), declared.mcp.tool_selected_list or None, f"{place}.mcp.tool_selected_list")


def _servers_path(declared: McpDeclaration, folder: Path) -> Path:
    """As in verl relative to the working directory, or else to the tools file."""
    path = declared.mcp_servers_config_path
    return path if path.exists() else folder / path


def _read(file: Path, where: str) -> dict[str, Any]:
    """The servers of a JSON file, by name."""
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"{where} has no servers; name them under `mcpServers`")
    return servers


def _validated(kind: type[_M], data: Any, where: str) -> _M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {mistake.line}" for mistake in explain(error, kind))) from error
