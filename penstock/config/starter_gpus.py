"""Divides the GPUs of one machine among the rollout servers and the roles of a new configuration.

gpus   servers            learner
0      1, on the CPU      every role on the CPU
1      1, shares the GPU  every role has a part of the GPU
n      n / 2              the rest, by placement
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

SHARED_UTILIZATION = 0.4
"""Share of the only GPU's memory that the engine takes. The learner has the rest."""
_WEIGHTS = {"policy": 4, "critic": 4, "reference": 1, "reward_model": 1}
"""How a GPU is divided among roles. Trained models also keep gradients and optimizer state there."""


@dataclass(frozen=True)
class RoleGpus:
    num_ranks: int
    gpus_per_rank: float


@dataclass(frozen=True)
class DividedGpus:
    num_servers: int
    roles: dict[str, RoleGpus]
    gpu_memory_utilization: float | None = None
    """Set if the server and the learner share one GPU."""


def divide_gpus(num_gpus: int, placement: str, roles: tuple[str, ...]) -> DividedGpus:
    """Raises ConfigError if the placement needs more GPUs. `roles` starts with the policy."""
    if num_gpus == 0:
        return DividedGpus(1, {role: RoleGpus(1, 0) for role in roles})
    if num_gpus == 1:
        return DividedGpus(1, shares_of_gpus(roles, 1), SHARED_UTILIZATION)
    num_groups = len(roles) if placement == "standalone" else 1
    num_servers = max(1, min(num_gpus // 2, num_gpus - num_groups))
    num_left = num_gpus - num_servers
    if num_left < num_groups:
        raise ConfigError(
            f"placement standalone needs {num_groups + 1} GPUs, one for each of {', '.join(roles)} and one for a "
            f"rollout server; there are {num_gpus}: use split-collocate"
        )
    if placement == "standalone":
        return DividedGpus(num_servers, _own_gpus(roles, num_left))
    return DividedGpus(num_servers, _collocated(roles, num_left))


def _own_gpus(roles: tuple[str, ...], num_gpus: int) -> dict[str, RoleGpus]:
    """One GPU for the reference; policy and critic share the others evenly."""
    num_ranks = dict.fromkeys(roles, 1)
    trained = [role for role in roles if role != "reference"]
    for index in range(num_gpus - len(roles)):
        num_ranks[trained[index % len(trained)]] += 1
    return {role: RoleGpus(count, 1) for role, count in num_ranks.items()}


def _collocated(roles: tuple[str, ...], num_gpus: int) -> dict[str, RoleGpus]:
    """The reference has a part of each of the policy's GPUs. A critic has GPUs of its own, if there are two."""
    if "critic" in roles and num_gpus == 1:
        return shares_of_gpus(roles, 1)
    num_critics = num_gpus // 2 if "critic" in roles else 0
    with_policy = tuple(role for role in roles if role != "critic")
    divided = shares_of_gpus(with_policy, num_gpus - num_critics)
    return divided | ({"critic": RoleGpus(num_critics, 1)} if num_critics else {})


def shares_of_gpus(roles: tuple[str, ...], num_ranks: int) -> dict[str, RoleGpus]:
    """Each role has `num_ranks` ranks, and a part of each of their GPUs."""
    whole = sum(_WEIGHTS[role] for role in roles)
    return {role: RoleGpus(num_ranks, int(100 * _WEIGHTS[role] / whole) / 100) for role in roles}
