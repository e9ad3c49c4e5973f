"""The built-in `python` tool: a code interpreter in the sandbox of code rewards."""

from __future__ import annotations

import json
from typing import Any

from penstock.config.tools import PythonTool as PythonSettings
from penstock.errors import ConfigError
from penstock_rollout.agents.builtin.schemas import built_in_schema
from penstock_rollout.agents.tools import Tool, ToolAnswer
from penstock_rollout.rewards.pool import RewardFailed, RewardPool

DESCRIPTION = (
    "Runs a Python program and returns what it prints. Nothing is kept between calls, and there is no network."
)
_SPARE_S = 30.0
"""How long the sandbox may take, beyond the program's own limit, to start a program and to end it."""


class PythonTool(Tool):
    """Runs programs in processes of its own, each of which runs one program at a time."""

    def __init__(self, name: str, settings: PythonSettings) -> None:
        schema = built_in_schema(name, settings.description or DESCRIPTION, {"code": "The Python program."})
        super().__init__(settings.model_dump(mode="json"), schema)
        self.timeout_s = settings.max_wait_s + settings.timeout_s + _SPARE_S
        self._run_s = settings.timeout_s + _SPARE_S
        self._settings = json.dumps(self.config, sort_keys=True)
        self._pool = RewardPool(settings.num_processes)

    async def open(self) -> None:
        try:
            await self._pool.prepare(self._settings)
        except RewardFailed as error:
            message = str(error).removeprefix("ConfigError: ")
            raise ConfigError(f"rollout.agents.tools.{self.name}: {message}") from error

    async def close(self) -> None:
        await self._pool.close()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ValueError('give the program as the text "code"')
        try:
            result = await self._pool.call(self._settings, {"code": code}, self._run_s)
        except RewardFailed as error:
            raise RuntimeError(f"the program could not be run: {error}") from error
        return result["text"], 0.0, {"calls": 1.0, "failed": 0.0 if result["succeeded"] else 1.0}
