"""Loads the tools and interactions that YAML files declare: classes of Penstock, and those written for verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.user_code import load_object
from penstock_rollout.agents.declarations import InteractionsFile, ToolDeclaration, ToolsFile, read_declarations
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.mcp.tools import McpServers
from penstock_rollout.agents.tools import Tool, Toolbox
from penstock_rollout.agents.verl.adapters import VerlInteraction, VerlTool, is_verl_interaction, is_verl_tool
from penstock_rollout.agents.verl.built_in import built_in_tool, is_built_in
from penstock_rollout.agents.verl.mcp_servers import mcp_servers_of
from penstock_rollout.agents.verl.stand_ins import verl_names

_TOOLS_FILE = "rollout.agents.tools_file"


def load_tools(path: Path) -> Toolbox:
    """Read the file and create one object per declared class. Entries of MCP servers are left out."""
    toolbox = Toolbox()
    for place, declared in _declared_tools(path):
        if not declared.is_mcp:
            toolbox.add(_tool(declared, place), place)
    return toolbox


def check_tools_file(path: Path) -> None:
    """Raise ConfigError if an entry is wrong. Imports no class: those of verl that are built in are checked too."""
    for place, declared in _declared_tools(path):
        if not declared.is_mcp and is_built_in(declared.class_name):
            _tool(declared, place)


def load_mcp_servers(path: Path) -> tuple[McpServers, ...]:
    """The MCP servers of the file's entries. They are not connected."""
    return tuple(
        mcp_servers_of(declared, path.parent, place) for place, declared in _declared_tools(path) if declared.is_mcp
    )


def _declared_tools(path: Path) -> list[tuple[str, ToolDeclaration]]:
    """Each entry with its place, for error messages."""
    tools = read_declarations(path, ToolsFile, _TOOLS_FILE).tools
    return [(f"{_TOOLS_FILE} {path}: tools.{index}", declared) for index, declared in enumerate(tools)]


def load_interactions(path: Path) -> dict[str, Interaction]:
    """Read the file and create one object per declared class."""
    where = "rollout.agents.interactions_file"
    interactions: dict[str, Interaction] = {}
    for index, declared in enumerate(read_declarations(path, InteractionsFile, where).interaction):
        place = f"{where} {path}: interaction.{index}"
        name = declared.chosen_name
        if name in interactions:
            raise ConfigError(f"{place}: an interaction {name!r} was declared already; give it another name")
        interactions[name] = _interaction(declared.class_name, name, declared.config, place)
    return interactions


def _tool(declared: ToolDeclaration, place: str) -> Tool:
    if is_built_in(declared.class_name):
        return built_in_tool(declared.class_name, declared.config, declared.openai_schema, place)
    loaded = _class(declared.class_name, place)
    is_own = isinstance(loaded, type) and issubclass(loaded, Tool)
    if not is_own and not is_verl_tool(loaded):
        raise ConfigError(
            f"{place}.class_name: {declared.class_name} is not a subclass of penstock_rollout.agents.tools.Tool, nor "
            "has it the methods of verl's BaseTool"
        )
    schema = declared.openai_schema
    if is_own and schema is None:
        raise ConfigError(f"{place}.tool_schema is missing; describe the function that the model calls")
    try:
        return loaded(declared.config, schema) if is_own else VerlTool.load(loaded, declared.config, schema)
    except Exception as error:
        raise ConfigError(f"{place}.class_name: {declared.class_name} cannot be created: {error!r}") from error


def _interaction(class_name: str, name: str, config: dict[str, Any], place: str) -> Interaction:
    loaded = _class(class_name, place)
    is_own = isinstance(loaded, type) and issubclass(loaded, Interaction)
    if not is_own and not is_verl_interaction(loaded):
        raise ConfigError(
            f"{place}.class_name: {class_name} is not a subclass of "
            "penstock_rollout.agents.interactions.Interaction, nor has it the methods of verl's BaseInteraction"
        )
    try:
        return loaded(config) if is_own else VerlInteraction.load(loaded, name, config)
    except Exception as error:
        raise ConfigError(f"{place}: {class_name} cannot be created: {error!r}") from error


def _class(class_name: str, place: str) -> Any:
    with verl_names():
        return load_object(class_name, f"{place}.class_name")
