"""Training steps over real workers in the test's own process, with one rank per role and without Ray. This needs the
fixture `one_rank`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from learner_ranks import make_rank, with_model
from penstock.config.loading import validate
from penstock_learner.loop.training_step import TrainingStep
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.dispatch import declarations
from penstock_learner.roles.role_group import RoleRecovery
from penstock_learner.roles.workers import trained_roles, worker_of
from penstock_learner.steps.skipped_updates import SkippedSteps


class LocalRole:
    """A role with one rank. Its calls wait at `gates` for the calls of other roles. Updates have one gate, and other
    calls have another."""

    num_ranks = 1

    def __init__(self, name: str, rank: Any, gates: dict[str, asyncio.Barrier]) -> None:
        self.name = name
        self.rank = rank
        self.gates = gates
        self.declarations = declarations(type(rank))

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if gate := self.gates.get("update" if method == "update" else "forward"):
            async with asyncio.timeout(10):
                await gate.wait()
        return [getattr(self.rank, method)(*arguments[0])]


def make_step(models: dict[str, Path], gates: dict[str, asyncio.Barrier] | None = None, **learner: Any) -> TrainingStep:
    config = validate(with_model({"learner": learner}, models["policy"]), "test")
    roles: Any = {
        name: LocalRole(name, make_rank(worker_of(config.learner, name), config, name), gates or {})
        for name in config.learner.needed_roles
    }
    metrics = LearnerMetrics(CollectorRegistry(), "standalone")
    trained = trained_roles(config.learner)
    skipped = SkippedSteps(0, models["policy"])
    return TrainingStep(config.learner, roles, trained, RoleRecovery(0, metrics), metrics, skipped)
