"""Restarts of roles whose ranks died or hang. How often is bounded; what is done about the step is the caller's."""

from __future__ import annotations

import logging
from collections import Counter

from penstock.errors import ProcessDied, RoleDied
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup

logger = logging.getLogger(__name__)


class RoleRecovery:
    """Counts each role's restarts in a row: those since `made_progress`."""

    def __init__(self, max_restarts: int, metrics: LearnerMetrics) -> None:
        self.max_restarts = max_restarts
        self.metrics = metrics
        self._in_a_row: Counter[str] = Counter()

    async def start(self, role: RoleGroup) -> None:
        """The first set of ranks, or the first that lives."""
        try:
            await role.start()
        except RoleDied as error:
            await self.restart(role, error)

    async def restart(self, role: RoleGroup, error: RoleDied) -> None:
        """A new set of ranks, loaded from the model folder. Raises ProcessDied when it was restarted too often."""
        while True:
            if self._in_a_row[role.name] >= self.max_restarts:
                raise ProcessDied(
                    f"{error}; it was restarted {self.max_restarts} times in a row (learner.max_role_restarts): see "
                    "its ranks' logs, then start the learner again, it resumes from its checkpoint"
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
        """A checkpoint is durable: what comes after cannot fail for the same reason for ever without being seen."""
        self._in_a_row.clear()
