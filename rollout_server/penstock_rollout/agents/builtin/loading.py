"""Creates the tools of `rollout.agents.tools`."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config.tools import BuiltInTool
from penstock.config.tools import PythonTool as PythonSettings
from penstock_rollout.agents.builtin.python_tool import PythonTool
from penstock_rollout.agents.builtin.search_tool import SearchTool
from penstock_rollout.agents.tools import Tool


def create_built_in(settings: Mapping[str, BuiltInTool]) -> list[Tool]:
    """One tool per entry. They do not work before `open`."""
    return [
        PythonTool(name, chosen) if isinstance(chosen, PythonSettings) else SearchTool(name, chosen)
        for name, chosen in settings.items()
    ]
