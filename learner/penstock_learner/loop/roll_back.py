"""Going back to an older version, when an operator rolls the servers back to it.

If the version has a checkpoint, the weights, the optimizers and the critic are restored from it. Otherwise the policy
takes the weights of the version's snapshot, in the engines' precision: its optimizer starts anew, and the critic stays
as it is. Steps, the learning rate schedule and the ledger continue: trained prompts stay trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CheckpointDamaged, NotFound, WeightPushFailed
from penstock.store.policies import PolicyRegistry
from penstock.trajectory import Group
from penstock_learner.checkpoints.checkpoint import CheckpointStore
from penstock_learner.checkpoints.loading import load_checkpoint
from penstock_learner.roles.role_group import RoleGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RollBack:
    """`new_version` has the weights of `policy_version`. The versions between them are given up.

    A learner that starts again from its checkpoint gives nothing up, but renumbers its versions in the same way: the
    steps after the checkpoint are trained once more, with the same batches, and make the same weights again."""

    policy_version: int
    new_version: int
    is_restart: bool = False

    def gave_up(self, group: Group) -> bool:
        """Whether a version that was given up sampled a token of the group."""
        return not self.is_restart and any(
            self.policy_version < segment.policy_version < self.new_version
            for trajectory in group.trajectories
            for segment in trajectory.segments
        )


def in_steps(versions: NDArray[np.int64], roll_backs: Sequence[RollBack]) -> NDArray[np.int64]:
    """Renumber versions so that their differences are steps of training.

    A version that was rolled back to gets the number of the new version with its weights, and older versions move along
    with it. For example, after a roll back from 5 to 3 as version 6, version 3 counts as 6 and version 2 as 5. Versions
    that were given up have no meaningful number.

    After a restart from version 3 as version 6, versions 4 and 5 move too: version 4 counts as 7, which will have its
    weights. A sample of such a version is newer than the policy, so its age is negative."""
    given = np.array([roll_back.policy_version for roll_back in roll_backs])
    targets, numbers = given, versions
    for index, roll_back in enumerate(roll_backs):
        # A later roll back may go past an earlier one, which has already renumbered its target.
        target = targets[index]
        change = roll_back.new_version - target
        moves = versions < roll_back.new_version if roll_back.is_restart else numbers <= target
        moves_target = given < roll_back.new_version if roll_back.is_restart else targets <= target
        numbers = np.where(moves, numbers + change, numbers)
        targets = np.where(moves_target, targets + change, targets)
    return numbers


def oldest_version(group: Group, roll_backs: Sequence[RollBack]) -> int:
    """The oldest version that sampled a token of the group, renumbered by `in_steps`."""
    return int(in_steps(np.array(group.min_version), roll_backs)) if roll_backs else group.min_version


async def load_version(
    policy_version: int, trained: Mapping[str, RoleGroup], checkpoints: CheckpointStore, policies: PolicyRegistry
) -> bool:
    """Load the version into the trained roles. False, changing nothing, if no checkpoint or snapshot is intact."""
    if (checkpoint := await asyncio.to_thread(checkpoints.of_version, policy_version)) is not None:
        try:
            await load_checkpoint(checkpoint, trained)
        except CheckpointDamaged as error:
            logger.error("cannot roll back to version %d from %s: %s", policy_version, checkpoint, error)
        else:
            logger.warning("rolled back to version %d, from %s", policy_version, checkpoint)
            return True
    try:
        policy = await policies.get(policy_version)
        await trained["policy"].call_all("load_snapshot", Path(policy.snapshot_path), policy.weights_digest)
    except (NotFound, WeightPushFailed) as error:
        logger.error("cannot roll back to version %d: %s; training continues as before", policy_version, error)
        return False
    logger.warning(
        "rolled back to version %d, from %s; the optimizer starts anew", policy_version, policy.snapshot_path
    )
    return True
