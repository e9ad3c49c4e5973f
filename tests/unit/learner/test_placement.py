"""Which roles share a resource group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.config.gpu_bundles import active_resource_groups, bundles, num_gpus
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.roles.ray_cluster import check_gpus, num_cpus, place_roles
from penstock_learner.roles.role_group import Reservation

ROLES = {"policy": RoleConfig(num_ranks=2, gpus_per_rank=0.5), "reference": RoleConfig(num_ranks=1, gpus_per_rank=0.5)}


def test_standalone_gives_every_role_its_own_group() -> None:
    groups = active_resource_groups("standalone", ROLES)
    assert [list(group) for group in groups] == [["policy"], ["reference"]]
    assert bundles(groups[0]) == [{"CPU": 1, "GPU": 0.5}] * 2


def test_split_collocate_shares_bundles_rank_by_rank() -> None:
    groups = active_resource_groups("split-collocate", ROLES)
    assert [list(group) for group in groups] == [["policy", "reference"]]
    assert bundles(groups[0]) == [{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 0.5}]


def test_gpus_that_a_machine_lacks_are_not_waited_for() -> None:
    check_gpus(LearnerConfig(placement="standalone"), ROLES, num_here=2)
    with pytest.raises(ConfigError, match=r"asks for 2 GPUs, but this machine has 1; lower it"):
        check_gpus(LearnerConfig(placement="standalone"), ROLES, num_here=1)


@pytest.mark.parametrize(
    ("policy", "reference", "alone", "shared"),
    [
        ((4, 0.75), (1, 0), 4, 4),  # three GPUs have as much, but no GPU has room for a second rank
        ((4, 0.5), (1, 0), 2, 2),
        ((4, 0.75), (4, 0.25), 4, 4),
        ((2, 0.5), (1, 0.5), 2, 2),
        ((3, 0.3), (1, 0.1), 1, 1),
        ((2, 1), (2, 0.5), 3, 3),
        ((2, 4), (0, 0), 8, 8),
        ((2, 0), (1, 0), 0, 0),
    ],
)
def test_a_share_of_a_gpu_is_on_one_gpu(
    policy: tuple[int, float], reference: tuple[int, float], alone: int, shared: int
) -> None:
    given = {"policy": policy, "reference": reference}
    roles = {name: RoleConfig(num_ranks=ranks, gpus_per_rank=gpus) for name, (ranks, gpus) in given.items() if ranks}
    assert num_gpus("standalone", roles) == alone
    assert num_gpus("split-collocate", roles) == shared


def test_ranks_that_no_gpu_can_hold_together_are_refused() -> None:
    def learner(policy: float, reference: float, placement: str) -> LearnerConfig:
        return LearnerConfig.model_validate(
            {"placement": placement, "policy": {"gpus_per_rank": policy}, "reference": {"gpus_per_rank": reference},
             "algorithm": {"kl": {"placement": "loss"}}}
        )  # fmt: skip

    for fitting in ((0.75, 0.25), (1, 0.5), (0.5, 0.5), (2, 1), (0, 0)):
        learner(*fitting, "split-collocate")
    learner(0.75, 0.75, "standalone")
    for too_much in ((0.75, 0.75), (0.6, 0.5), (1.5, 0.5)):
        with pytest.raises(ValueError, match=r"gpus_per_rank of policy \+ reference must add up to at most 1"):
            learner(*too_much, "split-collocate")
    with pytest.raises(ValueError, match="gpus_per_rank of policy must add up to at most 1, or be whole numbers"):
        learner(1.5, 1, "standalone")


def test_four_roles_make_four_groups_or_two() -> None:
    config = validate(
        {
            "model": {"path": "model"},
            "learner": {
                "algorithm": {"advantage": {"name": "gae"}, "kl": {"placement": "reward"}},
                "critic": {"num_ranks": 2},
                "reward_model": {"path": "reward"},
            },
        },
        "test",
    )
    roles = config.learner.needed_roles
    alone = active_resource_groups("standalone", roles)
    assert [list(group) for group in alone] == [["policy"], ["reference"], ["critic"], ["reward_model"]]
    shared = active_resource_groups("split-collocate", roles)
    assert [list(group) for group in shared] == [["policy", "reference"], ["critic", "reward_model"]]
    assert bundles(shared[1]) == [{"CPU": 2}, {"CPU": 1}]


def test_any_role_can_be_in_any_pool() -> None:
    """Pools have the names of their first roles, unless roles choose other names. Bundles add up."""

    def groups(placement: str, **pools: str) -> list[list[str]]:
        sizes = {"num_ranks": 2, "gpus_per_rank": 0.25}
        roles = {
            name: {"pool": pools.get(name, "")} | sizes for name in ("policy", "reference", "critic", "reward_model")
        }
        own = {name: {"worker": "critic", "pool": pools.get(name, "")} | sizes for name in ("zebra", "ape")}
        roles["reward_model"] |= {"path": "reward"}
        algorithm = {"advantage": {"name": "gae"}, "kl": {"placement": "reward"}}
        learner = LearnerConfig.model_validate(
            roles | {"roles": own, "step": "x.py:f", "placement": placement, "algorithm": algorithm}
        )
        found = active_resource_groups(placement, learner.needed_roles)
        for group in found:
            assert bundles(group) == [{"CPU": len(group), "GPU": 0.25 * len(group)}] * 2
        return [list(group) for group in found]

    both, alone = {"policy": "trained", "critic": "trained"}, [["ape"], ["zebra"]]
    assert groups("standalone", **both) == [["policy", "critic"], ["reference"], ["reward_model"], *alone]
    assert groups("standalone", critic="policy", ape="reference", zebra="reference") == [
        ["policy", "critic"], ["reference", "ape", "zebra"], ["reward_model"],
    ]  # fmt: skip
    assert groups("split-collocate", policy="critic", ape="ape", zebra="policy") == [
        ["policy", "critic", "reward_model"], ["reference", "zebra"], ["ape"],
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"gpus_per_rank of policy \+ critic must add up to at most 1"):
        settings = {"policy": {"gpus_per_rank": 0.6}, "critic": {"gpus_per_rank": 0.5, "pool": "policy"}}
        LearnerConfig.model_validate(settings | {"algorithm": {"advantage": {"name": "gae"}}})


def test_with_an_adapter_the_policy_is_its_own_reference() -> None:
    def roles(**learner: object) -> list[str]:
        algorithm = {"kl": {"placement": "loss"}}
        config = validate({"model": {"path": "model"}, "learner": {"algorithm": algorithm} | learner}, "test")
        return list(config.learner.needed_roles)

    lora = {"rank": 4, "alpha": 8}
    assert roles() == ["policy", "reference"]
    assert roles(lora=lora) == ["policy"]
    assert roles(lora=lora, reference={"path": "other"}) == ["policy", "reference"]
    assert roles(lora=lora, algorithm={"kl": {"placement": "none"}}) == ["policy"]


def test_a_private_ray_offers_what_the_placement_needs() -> None:
    assert num_cpus(LearnerConfig(placement="standalone"), ROLES) == 3


@pytest.mark.parametrize(("address", "most"), [("", 2), ("head:6379", 1)])
async def test_only_a_private_ray_places_groups_at_the_same_time(
    address: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may join a cluster one by one, and a later group must not take what an earlier one waits for."""
    running, found = list[Any](), list[int]()

    async def take(reserved: Reservation) -> None:
        running.append(reserved)
        found.append(len(running))
        await asyncio.sleep(0)
        running.remove(reserved)

    monkeypatch.setattr(Reservation, "take", take)
    learner = {"ray_address": address, "placement": "standalone", "algorithm": {"kl": {"placement": "loss"}}}
    config = validate({"run": "r", "model": {"path": "m"}, "learner": learner}, "test")
    placed = await place_roles(config, config.learner.needed_roles, timeout_s=1)
    assert list(placed) == ["policy", "reference"] and max(found) == most
