"""How the ranks of a push by gloo are divided into groups, so that a large fleet meets quickly.

The ranks of a gloo group all connect to each other, so a meeting of n ranks costs n² in all. A push to more than
`group_size` workers divides them. The first worker of each group is its relay: it receives each piece from the
publisher and hands it on to its group at once.

    publisher ──► relay ──► the others of its group
              ──► relay ──► …

Both sides compute the division from the numbers that an announcement has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupPlace:
    """The place of a rank in a gloo group. Rank 0 of the group sends, and all others receive."""

    name: str
    rank: int
    num_ranks: int


def is_divided(num_ranks: int, group_size: int) -> bool:
    """Return whether the ranks, with the publisher, meet in more than one group."""
    return num_ranks - 1 > group_size


def group_places(rank: int, num_ranks: int, group_size: int) -> list[GroupPlace]:
    """Return the places of a rank: the one where it receives, or the publisher sends, and for a relay the one where it
    hands on. A relay that is alone has no second place. Sizes of groups differ by one at most."""
    num_workers = num_ranks - 1
    if not is_divided(num_ranks, group_size):
        return [GroupPlace("all", rank, num_ranks)]
    num_groups = -(-num_workers // group_size)
    if rank == 0:
        return [GroupPlace("relays", 0, num_groups + 1)]
    group = (rank * num_groups - 1) // num_workers
    first, after = (number * num_workers // num_groups for number in (group, group + 1))
    own = GroupPlace(f"group-{group}", rank - 1 - first, after - first)
    if own.rank:
        return [own]
    relay = GroupPlace("relays", group + 1, num_groups + 1)
    return [relay, own] if own.num_ranks > 1 else [relay]
