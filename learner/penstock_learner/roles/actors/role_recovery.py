"""Restarts roles whose ranks died or hang, a limited number of times. The caller decides what happens to the step."""

from __future__ import annotations

import logging
from collections import Counter

from penstock.errors import ProcessDied, RoleDied
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.actors.role_group import RoleGroup

logger = logging.getLogger(__name__)


class RoleRecovery:
    """Counts the restarts of each role since `made_progress` was last called."""

    def __init__(self, max_restarts: int, metrics: LearnerMetrics) -> None:
        self.max_restarts = max_restarts
        self.metrics = metrics
        self._in_a_row: Counter[str] = Counter()

    async def start(self, role: RoleGroup) -> None:
        """Start the role. If a rank dies while it starts, restart it."""
        try:
            await role.start()
        except RoleDied as error:
            await self.restart(role, error)

    async def restart(self, role: RoleGroup, error: RoleDied) -> None:
        """Start a new set of ranks from the model folder. Raises ProcessDied after too many restarts in a row."""
        while True:
            if self._in_a_row[role.name] >= self.max_restarts:
                raise ProcessDied(
                    f"{error}; it was restarted {self.max_restarts} times in a row (learner.max_role_restarts); see "
                    "the logs of its ranks, then start the learner again; it resumes from its checkpoint"
                ) from error
            self._in_a_row[role.name] += 1
            self.metrics.role_restarts.labels(role.name).inc()
            logger.warning("%s; the %s role is restarted", error, role.name)
            try:
                await role.start()
                return
            except RoleDied as again:
                error = again

    def made_progress(self) -> None:
        """Called when a checkpoint is durable: restarts before it no longer count."""
        self._in_a_row.clear()
