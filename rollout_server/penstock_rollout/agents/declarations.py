"""Reads the YAML files that declare tools and interactions, in verl's format. Error messages have one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.base import Config
from penstock.config.explanation import explain
from penstock.errors import ConfigError


class _Function(BaseModel):
    """A function in OpenAI's format. Additional keys are passed on to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}


class _ToolSchema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    type: Literal["function"] = "function"
    function: _Function


class McpDeclaration(Config):
    """MCP servers whose tools are offered, in verl's format."""

    mcp_servers_config_path: Path
    tool_selected_list: list[str] | None = None
    """None: all tools of the servers."""


class ToolDeclaration(Config):
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}
    tool_schema: _ToolSchema | None = None
    """None: a tool of verl that has a schema of its own."""
    mcp: McpDeclaration | None = None

    @property
    def is_mcp(self) -> bool:
        """Whether the entry stands for the tools of MCP servers."""
        return self.mcp is not None or self.config.get("type") == "mcp"

    @property
    def openai_schema(self) -> dict[str, Any] | None:
        """The schema as written in the file. Keys that were left out stay out."""
        if self.tool_schema is None:
            return None
        return {"type": "function"} | self.tool_schema.model_dump(exclude_unset=True)


class InteractionDeclaration(Config):
    name: str | None = Field(default=None, min_length=1)
    """None: the name of the class without `Interaction`, in lower case, as in verl."""
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}

    @property
    def chosen_name(self) -> str:
        class_name = self.class_name.replace(":", ".").rpartition(".")[2]
        return self.name or (class_name.removesuffix("Interaction") or class_name).lower()


class ToolsFile(Config):
    tools: list[ToolDeclaration] = Field(min_length=1)


class InteractionsFile(Config):
    interaction: list[InteractionDeclaration] = Field(min_length=1)


_F = TypeVar("_F", ToolsFile, InteractionsFile)


def read_declarations(path: Path, kind: type[_F], where: str) -> _F:
    """Read and check a file. `where` is the config field that names it, for error messages."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{where} {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} {path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [f"{where} {path}: {mistake.line}" for mistake in explain(error, kind)]
        raise ConfigError("\n".join(lines)) from error
