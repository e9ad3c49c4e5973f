"""Which roles share a resource group."""

from __future__ import annotations

import pytest

from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.roles.placement import active_resource_groups, bundles, check_gpus, num_cpus

ROLES = {"policy": RoleConfig(num_ranks=2, gpus_per_rank=0.5), "reference": RoleConfig(num_ranks=1, gpus_per_rank=0.5)}


def test_standalone_gives_every_role_its_own_group() -> None:
    groups = active_resource_groups(LearnerConfig(placement="standalone"), ROLES)
    assert [list(group) for group in groups] == [["policy"], ["reference"]]
    assert bundles(groups[0]) == [{"CPU": 1, "GPU": 0.5}] * 2


def test_split_collocate_shares_bundles_rank_by_rank() -> None:
    groups = active_resource_groups(LearnerConfig(placement="split-collocate"), ROLES)
    assert [list(group) for group in groups] == [["policy", "reference"]]
    assert bundles(groups[0]) == [{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 0.5}]


def test_gpus_that_a_machine_lacks_are_not_waited_for() -> None:
    check_gpus(LearnerConfig(placement="standalone"), ROLES, num_here=1.5)
    with pytest.raises(ConfigError, match=r"asks for 1.5 GPUs, but this machine has 0; lower it"):
        check_gpus(LearnerConfig(placement="standalone"), ROLES, num_here=0)


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
    alone = active_resource_groups(LearnerConfig(placement="standalone"), roles)
    assert [list(group) for group in alone] == [["policy"], ["reference"], ["critic"], ["reward_model"]]
    shared = active_resource_groups(LearnerConfig(placement="split-collocate"), roles)
    assert [list(group) for group in shared] == [["policy", "reference"], ["critic", "reward_model"]]
    assert bundles(shared[1]) == [{"CPU": 2}, {"CPU": 1}]


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
    assert num_cpus(LearnerConfig(placement="standalone"), ROLES) == 4
