"""Which roles share GPUs, and how many whole GPUs they need.

    standalone         policy | reference | critic | reward model     one pool each
    split-collocate    policy + reference | critic + reward model     two pools, `policy` and `critic`

A role that a user adds has its own pool in the first placement, and is in `critic` in the second. Any role's `pool`
overrides that. The roles of a pool are a resource group: rank i of each of them is in bundle i of the group. Ray places
a bundle as a whole: whole GPUs first, and a fraction on one GPU. So four bundles of 0.75 need four GPUs, and four of
0.5 need two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

BUILT_IN = ("policy", "reference", "critic", "reward_model")
_SMALLEST = 1e-4
"""Ray counts GPUs in these units."""


class RoleShares(Protocol):
    """Ranks of a role, and what each of them reserves."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def cpus_per_rank(self) -> float: ...
    @property
    def gpus_per_rank(self) -> float: ...
    @property
    def pool(self) -> str: ...


R = TypeVar("R", bound=RoleShares)


def pools(placement: str, chosen: Mapping[str, str]) -> list[list[str]]:
    """The roles of each pool, from what each role has chosen: a pool, or an empty text for that of the placement."""
    found: dict[str, list[str]] = {}
    for name in (*BUILT_IN, *sorted(chosen.keys() - set(BUILT_IN))):
        if name in chosen:
            default = "policy" if name in ("policy", "reference") else "critic"
            found.setdefault(chosen[name] or (name if placement == "standalone" else default), []).append(name)
    return list(found.values())


def active_resource_groups(placement: str, roles: Mapping[str, R]) -> list[dict[str, R]]:
    """The resource groups of the roles that a run needs: one for each pool."""
    shared = pools(placement, {name: role.pool for name, role in roles.items()})
    return [{name: roles[name] for name in names} for names in shared]


def bundles(group: Mapping[str, RoleShares]) -> list[dict[str, float]]:
    """The resources of each bundle: the sum over the roles that have a rank in it."""
    result = []
    for present in _ranks(group):
        bundle = {
            "CPU": sum(role.cpus_per_rank for role in present),
            "GPU": sum(role.gpus_per_rank for role in present),
        }
        result.append({name: amount for name, amount in bundle.items() if amount})
    return result


def num_gpus(placement: str, roles: Mapping[str, RoleShares]) -> int:
    """Number of whole GPUs that the bundles of all roles need."""
    whole, fractions = 0, []
    for group in active_resource_groups(placement, roles):
        for bundle in bundles(group):
            full, rest = divmod(bundle.get("GPU", 0.0) + _SMALLEST / 2, 1)
            whole += int(full)
            fractions += [rest - _SMALLEST / 2] if rest > _SMALLEST else []
    return whole + len(_packed(fractions))


def find_unplaceable(placement: str, roles: Mapping[str, RoleShares]) -> str:
    """The roles whose ranks do not fit into their bundle, or an empty text: 1.5 GPUs cannot hold two ranks of 0.75."""
    for group in active_resource_groups(placement, roles):
        for present in _ranks(group):
            fractions = [role.gpus_per_rank for role in present if role.gpus_per_rank % 1]
            if sum(fractions) > 1 + _SMALLEST or any(fraction > 1 for fraction in fractions):
                return " + ".join(group)
    return ""


def _ranks(group: Mapping[str, R]) -> list[list[R]]:
    """The roles that have a rank in each bundle."""
    num_bundles = max(role.num_ranks for role in group.values())
    return [[role for role in group.values() if rank < role.num_ranks] for rank in range(num_bundles)]


def _packed(fractions: Iterable[float]) -> list[list[float]]:
    """Put each fraction on the first GPU that has room for it, the largest first."""
    gpus: list[list[float]] = []
    for fraction in sorted(fractions, reverse=True):
        room = next((gpu for gpu in gpus if sum(gpu) + fraction <= 1 + _SMALLEST), None)
        if room is None:
            gpus.append([fraction])
        else:
            room.append(fraction)
    return gpus
