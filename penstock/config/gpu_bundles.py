"""Which roles share GPUs, and how many whole GPUs they need.

    standalone         policy | reference | critic | reward model     one resource group each
    split-collocate    policy + reference | critic + reward model     two groups

A role that a user adds has a separate group in the first placement. In the second its `shares_gpus_of` says in
which one it is.

Rank i of every role of a resource group is in bundle i of the group. Ray places a bundle as a whole: whole GPUs first,
and a fraction on one GPU. So four bundles of 0.75 need four GPUs, and four of 0.5 need two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

RESOURCE_GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "standalone": (("policy",), ("reference",), ("critic",), ("reward_model",)),
    "split-collocate": (("policy", "reference"), ("critic", "reward_model")),
}
"""The roles of each resource group, by placement."""
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


R = TypeVar("R", bound=RoleShares)


def active_resource_groups(placement: str, roles: Mapping[str, R]) -> list[dict[str, R]]:
    """The resource groups of the placement, with the roles that a run needs. Empty groups are omitted."""
    listed = [set(names) for names in RESOURCE_GROUPS[placement]]
    for name in sorted(roles.keys() - {name for names in listed for name in names}):
        shared = getattr(roles[name], "shares_gpus_of", "none") if placement == "split-collocate" else "none"
        group = next((names for names in listed if shared in names), None)
        if group is None:
            listed.append({name})
        else:
            group.add(name)
    groups = [{name: role for name, role in roles.items() if name in names} for names in listed]
    return [group for group in groups if group]


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
