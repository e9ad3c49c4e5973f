"""Reserves a Ray placement group for each resource group of `penstock/config/gpu_bundles.py`.

Rank i of every role of a resource group sits in bundle i of its placement group. The controller does not know which
placement it runs on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from penstock.config.gpu_bundles import active_resource_groups, bundles, num_gpus
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded
from penstock_learner.roles.actors.role_actors import RoleActors
from penstock_learner.roles.actors.role_group import RoleGroup


def num_cpus(learner: LearnerConfig, roles: Mapping[str, RoleConfig]) -> int:
    """Logical CPUs that a private Ray must offer so that all roles fit. Ray starts as many processes at once."""
    groups = active_resource_groups(learner.placement, roles)
    return int(sum(bundle.get("CPU", 0) for group in groups for bundle in bundles(group)) + 0.999)


def check_gpus(learner: LearnerConfig, roles: Mapping[str, RoleConfig], num_here: float) -> None:
    """Raise ConfigError if this machine has too few GPUs for the roles. A private Ray cannot get more nodes."""
    num_needed = num_gpus(learner.placement, roles)
    if num_needed > num_here:
        raise ConfigError(
            f"learner.*.gpus_per_rank asks for {num_needed} GPUs, but this machine has {num_here:g}; lower it or "
            "num_ranks, or set learner.ray_address to a cluster"
        )


async def place_roles(config: RunConfig, roles: Mapping[str, RoleConfig], timeout_s: float) -> dict[str, RoleGroup]:
    """Reserve the resources of all roles, which can then be started. Raises DeadlineExceeded if they do not fit."""
    placed: dict[str, RoleGroup] = {}
    if not config.learner.ray_address:
        check_gpus(config.learner, roles, ray.cluster_resources().get("GPU", 0))
    for group in active_resource_groups(config.learner.placement, roles):
        reserved = _reserve(config, group)
        if not await _is_ready(reserved, timeout_s):
            raise DeadlineExceeded(
                f"the cluster has no room for {' + '.join(group)} ({bundles(group)}) after {timeout_s:.0f} s; "
                "add nodes, or lower learner.*.num_ranks"
            )
        for name, role in group.items():
            placed[name] = RoleGroup(RoleActors(config, name, role, reserved), config.learner.rank_timeout_s)
    return placed


async def _is_ready(reserved: PlacementGroup, timeout_s: float) -> bool:
    """Whether Ray reserves the resources in time. `PlacementGroup.ready` would run a task, in a process of its own."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        # In short pieces, because a thread cannot be cancelled.
        if await asyncio.to_thread(reserved.wait, min(left_s, 0.5)):
            return True
    return False


def _reserve(config: RunConfig, group: Mapping[str, RoleConfig]) -> PlacementGroup:
    """The placement group of a resource group. On a joined cluster it may still exist, with ranks in it."""
    if not config.learner.ray_address:
        return placement_group(bundles(group), strategy="PACK")
    name = "+".join(group)
    try:
        kept = get_placement_group(name)
    except ValueError:
        return placement_group(bundles(group), strategy="PACK", name=name, lifetime="detached")
    if kept.bundle_specs == bundles(group):
        return kept
    remove_placement_group(kept)
    return placement_group(bundles(group), strategy="PACK", name=name, lifetime="detached")
