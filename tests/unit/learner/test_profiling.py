"""Profiles of chosen steps on chosen ranks, with the real torch profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.loop.step_loop import profiled
from penstock_learner.roles.rank import Rank
from penstock_learner.roles.ray_cluster import profiles_folder


class LocalRole:
    """Ranks of the policy in this process."""

    def __init__(self, config: RunConfig, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ranks = [PolicyRank(config, rank, num_ranks) for rank in range(num_ranks)]

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        return getattr(self.ranks[rank], method)(*arguments)


class PolicyRank(Rank):
    role = "policy"
    device = torch.device("cpu")


def make_profiles(folder: Path, **profile: Any) -> tuple[Callable[[int], AbstractAsyncContextManager[None]], Path]:
    settings = {"model": {"path": "none"}, "run_dir": str(folder), "learner": {"profile": profile}}
    config = validate(settings, "test")
    roles: Any = {"policy": LocalRole(config, 2)}
    return partial(profiled, config, roles), profiles_folder(config)


async def test_a_trace_is_of_the_named_step_and_rank_only(tmp_path: Path) -> None:
    profiles, folder = make_profiles(tmp_path, steps=[2], ranks=[1, 7])
    for step, operation in ((1, torch.mm), (2, torch.add), (3, torch.mm)):
        async with profiles(step):
            operation(torch.ones(2, 2), torch.ones(2, 2))
    (path,) = folder.iterdir()
    assert path.name == "step-2-policy-1.json.gz"
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::add" in names and "aten::mm" not in names


async def test_a_step_that_failed_leaves_no_trace_and_the_next_attempt_does(tmp_path: Path) -> None:
    profiles, folder = make_profiles(tmp_path, steps=[1])
    with pytest.raises(ArithmeticError):
        async with profiles(1):
            raise ArithmeticError
    assert not folder.exists()
    async with profiles(1):
        torch.ones(2) + 1
    assert [path.name for path in folder.iterdir()] == ["step-1-policy-0.json.gz"]


async def test_a_folder_that_cannot_be_written_does_not_end_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles, folder = make_profiles(tmp_path, steps=[1])
    folder.parent.mkdir(parents=True)
    folder.touch()
    async with profiles(1):
        torch.ones(2) + 1
    assert "was not written" in caplog.text


def test_steps_on_no_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least one rank in profile\.ranks"):
        make_profiles(Path(), steps=[1], ranks=[])
