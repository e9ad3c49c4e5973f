"""A deployment with its memory, its durations and what to expect of it: the result of planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config import gpu_bundles
from penstock.config.learner import RoleConfig
from penstock.config.starter_gpus import shares_of_gpus
from penstock_tools.sizing.fleet_model import Forecast
from penstock_tools.sizing.hardware import Gpu
from penstock_tools.sizing.memory_terms import Moment, Setup, Term, peak, total
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.rates import RoleWork

Placement = Literal["standalone", "split-collocate"]
PLACEMENTS: tuple[Placement, ...] = ("standalone", "split-collocate")


@dataclass(frozen=True)
class RolePlan:
    """GPUs and memory of one role."""

    role: str
    num_gpus: int
    moments: tuple[Moment, ...]
    """The moments at which its fullest rank needs the most memory. Empty if it needs none of its own."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the memory of its fullest GPU, when that is fullest."""
        return peak(self.moments).device if self.moments else ()

    @property
    def num_bytes(self) -> float:
        return total(self.terms)

    @property
    def host_bytes(self) -> float:
        """Host memory of its fullest rank, when that needs the most."""
        return max((total(moment.host) for moment in self.moments), default=0.0)


@dataclass(frozen=True)
class Plan:
    """A deployment that fits: roles, servers, durations and what to expect."""

    model: ModelShape
    gpu: Gpu
    placement: Placement
    policy: RolePlan
    reference: RolePlan
    """In split-collocate it shares the policy's GPUs, and its own number is 0. With an adapter it is the policy."""
    others: tuple[RolePlan, ...]
    """Critic and reward model, if there are any. In split-collocate the reward model shares the critic's GPUs."""
    server: RolePlan
    """One rollout server; its number of GPUs is its tensor parallelism."""
    num_servers: int
    setup: Setup
    concurrent_groups: int
    group_s: float
    server_tokens_per_s: float
    train_s: float
    gather_s: float
    push_s: float
    pause_s: float
    forecast: Forecast
    sequence_parallel: int = 1
    is_packed: bool = False
    """All roles of the learner are on one GPU, and take turns."""
    shares_server_gpu: bool = False
    """The only server is on that GPU too."""
    has_reference: bool = True
    micro_batch_tokens: int = 0
    """`learner.micro_batch_tokens`. 0: as in `setup`."""
    max_staleness: int = 2

    @property
    def num_gpus(self) -> int:
        """GPUs of the learner's bundles, as Ray places them, and of the servers."""
        num_for_servers = 0 if self.shares_server_gpu else self.num_servers * self.server.num_gpus
        return gpu_bundles.num_gpus(self.placement, self.shares) + num_for_servers

    @property
    def shares(self) -> dict[str, RoleConfig]:
        """Ranks of each role of the learner, and the share of a GPU that each rank gets. Roles that share GPUs have as
        many ranks as the role before them."""
        if self.is_packed:
            names = tuple(role.role for role in self.learner_roles if role.moments)
            packed = shares_of_gpus(names, 1)
            return {name: RoleConfig(num_ranks=1, gpus_per_rank=share.gpus_per_rank) for name, share in packed.items()}
        found: dict[str, RoleConfig] = {}
        num_ranks = 1
        for role in self.learner_roles:
            num_ranks = role.num_gpus or num_ranks
            if not role.moments:
                continue
            group = next(names for names in gpu_bundles.RESOURCE_GROUPS[self.placement] if role.role in names)
            sharing = [other.role for other in self.learner_roles if other.role in group and other.moments]
            share = 1.0 if len(sharing) == 1 else (0.75 if role.role == sharing[0] else 0.25)
            found[role.role] = RoleConfig(num_ranks=num_ranks, gpus_per_rank=share)
        return found

    @property
    def learner_roles(self) -> tuple[RolePlan, ...]:
        return (self.policy, *((self.reference,) if self.has_reference else ()), *self.others)


def work_groups(roles: Sequence[RolePlan], active_parameters: int) -> list[list[RoleWork]]:
    """The roles by the GPUs that they share. A role without its own GPUs uses those of the role before it."""
    groups: list[list[RoleWork]] = []
    num_ranks = 1
    for role in roles:
        num_ranks = role.num_gpus or num_ranks
        if role.num_gpus:
            groups.append([])
        groups[-1].append(RoleWork(role.role, num_ranks, active_parameters))
    return groups
