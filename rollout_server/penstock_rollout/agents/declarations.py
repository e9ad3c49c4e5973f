"""Reads the YAML files that declare tools and interactions, in verl's format. Error messages have one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.base import Config
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


class ToolDeclaration(Config):
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}
    tool_schema: _ToolSchema

    @property
    def openai_schema(self) -> dict[str, Any]:
        """The schema as written in the file. Keys that were left out stay out."""
        return {"type": "function"} | self.tool_schema.model_dump(exclude_unset=True)


class InteractionDeclaration(Config):
    name: str = Field(min_length=1)
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}


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
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{where} {path}: {place}: {' '.join(first['msg'].split())}") from error
