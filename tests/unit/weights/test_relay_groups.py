"""The division of a push's ranks into gloo groups."""

from __future__ import annotations

from collections import defaultdict

import pytest

from penstock.weights.transports import GroupPlace, group_places


def test_few_workers_are_one_group() -> None:
    assert group_places(0, 5, 4) == [GroupPlace("all", 0, 5)]
    assert group_places(4, 5, 4) == [GroupPlace("all", 4, 5)]


@pytest.mark.parametrize("group_size", [2, 3, 8, 32])
@pytest.mark.parametrize("num_workers", [3, 7, 9, 33, 64, 65, 1000])
def test_every_group_is_full_and_every_worker_receives_once(num_workers: int, group_size: int) -> None:
    ranks: dict[str, dict[int, int]] = defaultdict(dict)
    sizes: dict[str, set[int]] = defaultdict(set)
    for rank in range(num_workers + 1):
        places = group_places(rank, num_workers + 1, group_size)
        assert [place.rank == 0 for place in places] == ([True] if rank == 0 else [False, True][: len(places)])
        for place in places:
            assert place.rank not in ranks[place.name]
            ranks[place.name][place.rank] = rank
            sizes[place.name].add(place.num_ranks)
    for name, by_rank in ranks.items():
        assert sizes[name] == {len(by_rank)}, "all ranks of a group expect the same number"
        assert sorted(by_rank) == list(range(len(by_rank)))
    if num_workers > group_size:
        groups = [len(by_rank) for name, by_rank in ranks.items() if name != "relays"]
        assert max(groups) <= group_size
        assert max(groups) - min(groups) <= 1
        assert len(ranks["relays"]) == -(-num_workers // group_size) + 1


def test_a_relay_that_is_alone_hands_nothing_on() -> None:
    assert group_places(1, 4, 2) == [GroupPlace("relays", 1, 3)]
    assert group_places(2, 4, 2) == [GroupPlace("relays", 2, 3), GroupPlace("group-1", 0, 2)]
    assert group_places(3, 4, 2) == [GroupPlace("group-1", 1, 2)]
