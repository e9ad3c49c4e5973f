"""Which steps are profiled, and by which ranks. The ranks record themselves: roles/profiling.py."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from penstock.config.run import RunConfig
from penstock_learner.roles.actors.role_group import RoleGroup, gather_all
from penstock_learner.roles.profiling import profiles_folder


class StepProfiles:
    """Tells the configured ranks of every role to record the configured steps."""

    def __init__(self, config: RunConfig, roles: Mapping[str, RoleGroup]) -> None:
        self.config = config.learner.profile
        self.folder = profiles_folder(config)
        self.roles = roles

    @contextlib.asynccontextmanager
    async def of_step(self, step: int) -> AsyncIterator[None]:
        """Record what the roles do in the `async with` block. A step that fails writes no trace."""
        if step not in self.config.steps:
            yield
            return
        await self._call("start_profile")
        yield
        await self._call("write_profile", self.folder, step)

    async def _call(self, method: str, *arguments: Path | int) -> None:
        ranks = [(role, rank) for role in self.roles.values() for rank in self.config.ranks if rank < role.num_ranks]
        await gather_all(*(role.call_rank(rank, method, *arguments) for role, rank in ranks))
