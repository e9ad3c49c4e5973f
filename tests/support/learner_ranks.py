"""Role workers and training steps in the test's own process, with one rank per role and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.dispatch import declarations
from penstock_learner.roles.rank import Rank
from penstock_learner.roles.role_group import RoleRecovery, trained_roles, worker_of
from penstock_learner.steps.program import TrainingStep
from penstock_learner.steps.step_result import SkippedSteps

RankT = TypeVar("RankT", bound=Rank)


@contextmanager
def one_rank_world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_rank(worker: type[RankT], config: RunConfig, name: str = "") -> RankT:
    """Make a loaded rank of the process group. It needs a config with `learner.publish_host`."""
    rank: Any = worker(config, dist.get_rank(), dist.get_world_size(), name=name)
    rank.device = torch.device("cpu")
    rank.load()
    loaded: RankT = rank
    return loaded


def with_model(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same settings for another model, ready for `make_rank`."""
    learner = config.get("learner", {}) | {"publish_host": "127.0.0.1"}
    return config | {"model": {"path": str(folder)}, "learner": learner}


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
            async with asyncio.timeout(60):
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
