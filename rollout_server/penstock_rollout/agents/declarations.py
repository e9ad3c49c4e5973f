"""Tools and interactions that YAML files declare, in verl's format. Error messages have one line.

A class may be Penstock's or one written for verl. For the tools and the interaction that verl ships, others take their
place: verl's own classes need Ray, and the one for programs needs a service. A key of their `config` is used or
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from penstock.config.base import Config
from penstock.config.loading import explain
from penstock.config.rollout import PythonTool, SearchTool
from penstock.errors import ConfigError, one_line
from penstock.user_code import load_object
from penstock_rollout.agents.builtin_tools import ProgramTool, RetrievalTool
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.tools import Tool, Toolbox
from penstock_rollout.agents.verl import (
    INTERACTION_METHODS,
    SHIPPED,
    TOOL_METHODS,
    OpenAIFunctionToolSchema,
    VerlInteraction,
    VerlTool,
    has_methods,
    verl_names,
)

_TOOLS_FILE = "rollout.agents.tools_file"
_M = TypeVar("_M", bound=BaseModel)


class ToolDeclaration(Config):
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}
    tool_schema: OpenAIFunctionToolSchema | None = None
    """None for a tool of verl that has its own schema."""
    mcp: Any = None
    """verl's block of MCP servers, which is refused."""


class InteractionDeclaration(Config):
    name: str | None = Field(default=None, min_length=1)
    """None for the name of the class without `Interaction`, in lower case, as in verl."""
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}


class ToolsFile(Config):
    tools: list[ToolDeclaration] = Field(min_length=1)


class InteractionsFile(Config):
    interaction: list[InteractionDeclaration] = Field(min_length=1)


def read_declarations(path: Path, kind: type[_M], where: str) -> _M:
    """Read and check a file. `where` is the config field that names it, for error messages."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{where} {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} {path} is not YAML: {one_line(error)}") from error
    return _validated(kind, data, f"{where} {path}")


class _Limits(Config):
    type: Literal["native"] = "native"
    num_workers: int = Field(ge=1)
    rate_limit: int = Field(ge=1)
    """In verl a number of calls at the same time, over all workers. Here it is one of each rollout server."""
    enable_global_rate_limit: bool = True

    @property
    def num_concurrent(self) -> int:
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers


class _SearchConfig(_Limits):
    """`config` of verl's SearchTool, with verl's defaults."""

    retrieval_service_url: str = Field(pattern=r"^https?://")
    topk: int = Field(default=3, ge=1)
    timeout: float = Field(default=30.0, gt=0)
    num_workers: int = Field(default=120, ge=1)
    rate_limit: int = Field(default=120, ge=1)

    def tool(self, name: str) -> Tool:
        settings = SearchTool(
            kind="search", url=self.retrieval_service_url, top_k=self.topk, timeout_s=self.timeout,
            max_concurrent=self.num_concurrent,
        )  # fmt: skip
        return RetrievalTool(name, settings)


class _SandboxConfig(_Limits):
    """`config` of verl's SandboxFusionTool, with verl's defaults. Its service is not called: a URL is refused."""

    default_timeout: float = Field(default=30.0, gt=0)
    default_language: Literal["python"] = "python"
    memory_limit_mb: int = Field(default=1024, ge=64)
    num_workers: int = Field(default=10, ge=1)
    rate_limit: int = Field(default=10, ge=1)

    def tool(self, name: str) -> Tool:
        settings = PythonTool(
            kind="python", timeout_s=self.default_timeout, memory_bytes=self.memory_limit_mb * 2**20,
            num_processes=self.num_concurrent,
        )  # fmt: skip
        return ProgramTool(name, settings)


_CONFIGS: dict[str, type[_SearchConfig] | type[_SandboxConfig]] = {
    "verl.tools.search_tool.SearchTool": _SearchConfig,
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": _SandboxConfig,
}


def _dotted(class_name: str) -> str:
    return class_name.replace(":", ".")


def _validated(kind: type[_M], data: Any, where: str) -> _M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {mistake.line}" for mistake in explain(error, kind))) from error


def load_tools(path: Path) -> Toolbox:
    toolbox = Toolbox()
    for index, declared in enumerate(read_declarations(path, ToolsFile, _TOOLS_FILE).tools):
        place = f"{_TOOLS_FILE} {path}: tools.{index}"
        if declared.mcp is not None or declared.config.get("type") == "mcp":
            raise ConfigError(
                f"{place}: MCP servers are not declared in this file; write them into the config, as "
                "`rollout.agents.mcp_servers: {NAME: {command: [PROGRAM, ARGUMENT]}}` or `{NAME: {url: ADDRESS}}`"
            )
        toolbox.add(_tool(declared, place), place)
    return toolbox


def load_interactions(path: Path) -> dict[str, Interaction]:
    where = "rollout.agents.interactions_file"
    interactions: dict[str, Interaction] = {}
    for index, declared in enumerate(read_declarations(path, InteractionsFile, where).interaction):
        place = f"{where} {path}: interaction.{index}"
        class_name = _dotted(declared.class_name).rpartition(".")[2]
        name = declared.name or (class_name.removesuffix("Interaction") or class_name).lower()
        if name in interactions:
            raise ConfigError(f"{place}: an interaction {name!r} was declared already; give it another name")
        interactions[name] = _interaction(declared.class_name, name, declared.config, place)
    return interactions


def _tool(declared: ToolDeclaration, place: str) -> Tool:
    built_in = _CONFIGS.get(_dotted(declared.class_name))
    schema: dict[str, Any] | None = None
    if declared.tool_schema is not None:  # as written in the file: keys that were omitted stay out
        schema = {"type": "function"} | declared.tool_schema.model_dump(exclude_unset=True)
    loaded = None if built_in else _class(declared.class_name, Tool, TOOL_METHODS, "verl's BaseTool", place)
    is_verl = loaded is not None and not issubclass(loaded, Tool)
    if schema is None and not is_verl:
        raise ConfigError(f"{place}.tool_schema is missing; describe the function that the model calls")
    if built_in is not None and schema is not None:
        given: _SearchConfig | _SandboxConfig = _validated(built_in, declared.config, f"{place}.config")
        tool = given.tool(schema["function"]["name"])
        tool.tool_schema = schema
        return tool
    assert loaded is not None
    try:
        return VerlTool(loaded, declared.config, schema) if is_verl else loaded(declared.config, schema)
    except Exception as error:
        raise ConfigError(f"{place}.class_name: {declared.class_name} cannot be created: {error!r}") from error


def _interaction(class_name: str, name: str, config: dict[str, Any], place: str) -> Interaction:
    loaded = _class(class_name, Interaction, INTERACTION_METHODS, "verl's BaseInteraction", place)
    try:
        return loaded(config) if issubclass(loaded, Interaction) else VerlInteraction(loaded, name, config)
    except Exception as error:
        raise ConfigError(f"{place}: {class_name} cannot be created: {error!r}") from error


def _class(class_name: str, own: type, methods: Sequence[str], of_verl: str, place: str) -> Any:
    """The class, which is a subclass of `own` or has verl's `methods`."""
    with verl_names():
        loaded: Any = SHIPPED.get(_dotted(class_name)) or load_object(class_name, f"{place}.class_name")
    if not (isinstance(loaded, type) and issubclass(loaded, own)) and not has_methods(loaded, *methods):
        raise ConfigError(
            f"{place}.class_name: {class_name} is not a subclass of {own.__module__}.{own.__name__}, nor has it the "
            f"methods of {of_verl}"
        )
    return loaded
