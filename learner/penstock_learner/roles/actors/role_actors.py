"""The Ray actors of one role: how a set of them is made, found again, and given up.

A set has one actor per rank. On a cluster that the learner joined (`learner.ray_address`), ranks outlive the
controller: the next controller finds them by name and adopts them, which saves it the start of the processes and the
loading of the models. Ranks that no controller has called for a while (rank.py) give up their resources by themselves.
In a private Ray, ranks end with their controller.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import Fenced

SAVE_LANE = "save"
LANES = ("push", "catch_up", SAVE_LANE)
"""Besides the training thread, each rank has one thread per lane: for pushes, catch-up pushes and checkpoints."""
BEAT_LANE = "beat"
"""The thread in which a rank learns that its controller is alive."""


def namespace_of(config: RunConfig) -> str:
    """Ray's namespace of a run. Names of actors are unique within it."""
    return f"penstock-{config.run}"


@dataclass(frozen=True)
class RoleActors:
    """Makes and finds the actors of a role, on resources that are reserved for it."""

    config: RunConfig
    name: str
    role: RoleConfig
    reserved: PlacementGroup

    @property
    def outlive_controller(self) -> bool:
        return bool(self.config.learner.ray_address)

    @property
    def has_spares(self) -> bool:
        return self.config.learner.spare_ranks

    @property
    def can_be_adopted(self) -> bool:
        """Whether ranks that outlive their controller fit the next one. Those of a user's class may be of another
        version of its file."""
        own = self.config.learner.roles.get(self.name)
        return own is None or not own.is_own_class

    def prepare(self) -> None:
        """Import the models, which `make` needs and a controller that adopts its ranks does not. Blocks for seconds."""
        importlib.import_module("penstock_learner.roles.workers")

    def make(self, number: int, owner: str) -> list[Any]:
        """Make one actor per rank. `number` makes the names differ from those of the other sets."""
        from penstock_learner.roles.workers import worker_of

        worker = worker_of(self.config.learner, self.name)
        remote: Any = ray.remote(concurrency_groups=dict.fromkeys((*LANES, BEAT_LANE), 1))(worker)
        share = 0.5 if self.has_spares else 1.0  # a rank and its spare have the same bundle
        try:
            return [
                remote.options(
                    name=f"{self.name}-{rank}-{number}",
                    lifetime="detached" if self.outlive_controller else None,
                    num_cpus=self.role.cpus_per_rank * share,
                    num_gpus=self.role.gpus_per_rank * share,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self.reserved, placement_group_bundle_index=rank
                    ),
                ).remote(self.config, rank, self.role.num_ranks, owner, self.name)
                for rank in range(self.role.num_ranks)
            ]
        except ValueError as error:
            raise Fenced(f"{error}; another learner has started ranks of this run, stop this one") from error

    def find(self) -> dict[int, list[Any]]:
        """The sets that an earlier controller left, by number. A rank of a set may have died."""
        if not self.outlive_controller:
            return {}
        sets: dict[int, dict[int, Any]] = defaultdict(dict)
        for name in list_named_actors():
            if match := re.fullmatch(rf"{self.name}-(\d+)-(\d+)", name):
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    sets[int(match[2])][int(match[1])] = ray.get_actor(name)
        return {number: [ranks[rank] for rank in sorted(ranks)] for number, ranks in sorted(sets.items())}

    def give_up(self) -> None:
        """End all ranks of the role's resource group, and free its resources."""
        remove_placement_group(self.reserved)
