"""Memory that the roles of a given configuration need, and whether it fits on its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.config.gpu_bundles import active_resource_groups
from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock_tools.sizing.hardware import USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import role_moments
from penstock_tools.sizing.memory_terms import Moment, Role, Setup, peak, total
from penstock_tools.sizing.model_folder import find_shape


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one rank of a role."""

    role: str
    shares: RoleConfig
    moments: tuple[Moment, ...]

    @property
    def num_bytes(self) -> float:
        """The most that a rank needs on its GPU."""
        return total(peak(self.moments).device) if self.moments else 0.0


@dataclass(frozen=True)
class GroupMemory:
    """The memory of the roles that share GPUs, on one of them."""

    roles: tuple[RoleMemory, ...]
    gpu: Gpu

    @property
    def num_bytes(self) -> float:
        return sum(role.num_bytes for role in self.roles)

    @property
    def fits(self) -> bool:
        """Whether the first rank of every role fits on the GPUs of its bundle."""
        num_gpus = max(1.0, sum(role.shares.gpus_per_rank for role in self.roles))
        return self.num_bytes <= num_gpus * self.gpu.memory_bytes * USABLE_MEMORY


def memory_of(config: RunConfig, gpu: Gpu) -> list[GroupMemory]:
    """The memory of the learner's roles, by the groups in which they share GPUs."""
    roles = config.learner.needed_roles
    return [
        GroupMemory(tuple(_role_memory(config, name, shares) for name, shares in group.items()), gpu)
        for group in active_resource_groups(config.learner.placement, roles)
    ]


def _role_memory(config: RunConfig, name: str, shares: RoleConfig) -> RoleMemory:
    """The memory of a role. A worker class of the user's own has no moments: nobody knows what it holds."""
    own = config.learner.roles.get(name)
    if own is not None and own.is_own_class:
        return RoleMemory(name, shares, ())
    kind = name if own is None else own.worker
    shape = find_shape(str(_folder(config, shares)))
    moments = role_moments(cast(Role, kind), shape, shares.num_ranks, Setup.of(config, name))
    return RoleMemory(name, shares, tuple(moments))


def _folder(config: RunConfig, shares: RoleConfig) -> Path:
    """The model folder of a role: its own, or the policy's."""
    own: Path | None = getattr(shares, "path", None)
    return own or config.model.path
