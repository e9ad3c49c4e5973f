"""Built-in tools in place of those that verl ships, where a tools file names verl's classes.

verl's own classes need Ray, and the one for programs needs a service. A key of their `config` is taken over, named in
the log if it has no effect here, or refused.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import Field, ValidationError

from penstock.config.base import Config
from penstock.config.explanation import explain
from penstock.config.tools import PythonTool as PythonSettings
from penstock.config.tools import SearchTool as SearchSettings
from penstock.errors import ConfigError
from penstock_rollout.agents.builtin.python_tool import PythonTool
from penstock_rollout.agents.builtin.search_tool import SearchTool
from penstock_rollout.agents.tools import Tool

logger = logging.getLogger(__name__)


class _Limits(Config):
    type: Literal["native"] = "native"
    num_workers: int = Field(ge=1)
    rate_limit: int = Field(ge=1)
    """In verl a number of calls at the same time, over all workers. Here it is one of each rollout server."""
    enable_global_rate_limit: bool = True

    @property
    def num_concurrent(self) -> int:
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers


class _Search(_Limits):
    """`config` of verl's SearchTool, with verl's defaults."""

    retrieval_service_url: str = Field(pattern=r"^https?://")
    topk: int = Field(default=3, ge=1)
    timeout: float = Field(default=30.0, gt=0)
    num_workers: int = Field(default=120, ge=1)
    rate_limit: int = Field(default=120, ge=1)

    def tool(self, name: str, place: str) -> Tool:
        settings = SearchSettings(
            kind="search", url=self.retrieval_service_url, top_k=self.topk, timeout_s=self.timeout,
            max_concurrent=self.num_concurrent,
        )  # fmt: skip
        return SearchTool(name, settings)


class _Sandbox(_Limits):
    """`config` of verl's SandboxFusionTool, with verl's defaults."""

    sandbox_fusion_url: str = ""
    default_timeout: float = Field(default=30.0, gt=0)
    default_language: Literal["python"] = "python"
    memory_limit_mb: int = Field(default=1024, ge=64)
    num_workers: int = Field(default=10, ge=1)
    rate_limit: int = Field(default=10, ge=1)

    def tool(self, name: str, place: str) -> Tool:
        if self.sandbox_fusion_url:
            logger.warning(
                "%s.config.sandbox_fusion_url is not called: programs run in the rollout server's own sandbox", place
            )
        settings = PythonSettings(
            kind="python", timeout_s=self.default_timeout, memory_bytes=self.memory_limit_mb * 2**20,
            num_processes=self.num_concurrent,
        )  # fmt: skip
        return PythonTool(name, settings)


_CONFIGS: dict[str, type[_Search] | type[_Sandbox]] = {
    "verl.tools.search_tool.SearchTool": _Search,
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": _Sandbox,
}


def is_built_in(class_name: str) -> bool:
    return _dotted(class_name) in _CONFIGS


def built_in_tool(class_name: str, config: dict[str, Any], schema: dict[str, Any] | None, place: str) -> Tool:
    """The tool that does what verl's class does. The model sees the schema of the file. Raises ConfigError."""
    if schema is None:
        raise ConfigError(f"{place}.tool_schema is missing; describe the function that the model calls")
    kind = _CONFIGS[_dotted(class_name)]
    try:
        given = kind.model_validate(config)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{place}.config: {mistake.line}" for mistake in explain(error, kind))) from error
    tool = given.tool(schema["function"]["name"], place)
    tool.tool_schema = schema
    return tool


def _dotted(class_name: str) -> str:
    return class_name.replace(":", ".")
