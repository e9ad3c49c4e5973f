"""Going back to an older version, as an operator who rolls the servers back to it wants.

The weights are those of the version's checkpoint where there is one, optimizer and critic with them; else those of its
snapshot, in the engines' precision, with an optimizer that begins anew and the critic as it is. Steps, the schedule of
the learning rate and the ledger go on: what was trained stays trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NotFound, WeightPushFailed
from penstock.store.policies import PolicyRegistry
from penstock.trajectory import Group
from penstock_learner.loop.checkpoint import CheckpointStore, shards_folder
from penstock_learner.roles.role_group import RoleGroup, all_ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RollBack:
    """`new_version` has the weights of `policy_version`; what lies between is given up."""

    policy_version: int
    new_version: int

    def gave_up(self, group: Group) -> bool:
        """Whether a token of the group is of a version that was given up."""
        return any(
            self.policy_version < segment.policy_version < self.new_version
            for trajectory in group.trajectories
            for segment in trajectory.segments
        )


def in_steps(versions: NDArray[np.int64], roll_backs: Sequence[RollBack]) -> NDArray[np.int64]:
    """Versions as numbers whose differences are steps of training: a version that was gone back to counts as the one
    that then had its weights, and those before it move along. What was given up has no such number."""
    gone_back_to = np.array([roll_back.policy_version for roll_back in roll_backs])
    for index, roll_back in enumerate(roll_backs):
        # It may have gone back past an earlier one, which has moved the version that it names.
        target = gone_back_to[index]
        versions = np.where(versions <= target, versions + roll_back.new_version - target, versions)
        gone_back_to = np.where(gone_back_to <= target, gone_back_to + roll_back.new_version - target, gone_back_to)
    return versions


def oldest_version(group: Group, roll_backs: Sequence[RollBack]) -> int:
    """That made a token, `in_steps`."""
    return int(in_steps(np.array(group.min_version), roll_backs))


async def load_version(
    policy_version: int, trained: Mapping[str, RoleGroup], checkpoints: CheckpointStore, policies: PolicyRegistry
) -> bool:
    """Bring the roles that train back. False, and they are as they were, when nothing of the version is left."""
    if (checkpoint := checkpoints.of_version(policy_version)) is not None:
        logger.warning("rolled back to version %d, from %s", policy_version, checkpoint)
        await all_ended(*(role.call_all("restore", shards_folder(checkpoint, name)) for name, role in trained.items()))
        return True
    try:
        snapshot = Path((await policies.get(policy_version)).snapshot_path)
        await trained["policy"].call_all("load_snapshot", snapshot)
    except (NotFound, WeightPushFailed) as error:
        logger.error("cannot roll back to version %d: %s; training goes on", policy_version, error)
        return False
    logger.warning("rolled back to version %d, from %s; the optimizer begins anew", policy_version, snapshot)
    return True
