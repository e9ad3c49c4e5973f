"""Profiles of chosen steps on chosen ranks, with the real torch profiler, and what is asked of Nsight."""

from __future__ import annotations

import gzip
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.loop.step_loop import profiled
from penstock_learner.roles.profiling import (
    NSYS_OPTIONS,
    check_profiler,
    profiles_folder,
    runtime_environment,
)
from penstock_learner.roles.rank import Rank


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


# ── Nsight ──


def nsight_config(folder: Path, **learner: Any) -> RunConfig:
    profile = {"tool": "nsight", "steps": [2, 3, 5], "ranks": [1]}
    learner = {"profile": profile, "policy": {"num_ranks": 2, "gpus_per_rank": 1}} | learner
    return validate({"model": {"path": "none"}, "run_dir": str(folder), "learner": learner}, "test")


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank asks of CUDA and NVTX."""
    calls: list[str] = []

    @contextmanager
    def nvtx_range(name: str) -> Iterator[None]:
        calls.append(f"push {name}")
        yield
        calls.append("pop")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "mark", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    return calls


async def test_nsight_records_calls_of_the_named_step_as_ranges(tmp_path: Path, cuda_calls: list[str]) -> None:
    config = nsight_config(tmp_path)
    role = LocalRole(config, 2)
    for rank in role.ranks:
        rank.device = torch.device("cuda")
    roles: Any = {"policy": role}
    for step in range(1, 7):
        async with profiled(config, roles, step):
            for rank in role.ranks:
                rank.call("", "wait_idle")
    call = ["push policy.wait_idle", "pop"]
    successive = ["start", "step 2", *call, "step 3", *call, "stop"]
    assert cuda_calls == [*successive, "start", "step 5", *call, "stop"]
    assert not profiles_folder(config).exists(), "nsys writes the reports"


async def test_nsight_skips_ranks_on_a_cpu(tmp_path: Path, cuda_calls: list[str]) -> None:
    config = nsight_config(tmp_path)
    roles: Any = {"policy": LocalRole(config, 2)}
    async with profiled(config, roles, 2):
        roles["policy"].ranks[1].call("", "wait_idle")
    assert cuda_calls == []


def test_nsys_starts_the_ranks_that_it_records(tmp_path: Path) -> None:
    config = nsight_config(tmp_path / "a run")
    policy = config.learner.policy
    assert runtime_environment(config, "policy", policy, 0) == {}
    words = shlex.split(runtime_environment(config, "policy", policy, 1)["runtime_env"]["py_executable"])
    output = f"--output={tmp_path}/a run/{config.run}/profiles/nsight-policy-1-%p"
    assert words == ["nsys", "profile", *NSYS_OPTIONS, output, sys.executable]
    assert profiles_folder(config).is_dir(), "nsys makes no folder"
    on_cpu = nsight_config(tmp_path, policy={"gpus_per_rank": 0, "num_ranks": 2})
    assert runtime_environment(on_cpu, "policy", on_cpu.learner.policy, 1) == {}
    unused = nsight_config(tmp_path, profile={"tool": "nsight"})
    assert runtime_environment(unused, "policy", policy, 0) == {}


def test_nsight_without_nsys_or_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = nsight_config(tmp_path)
    with pytest.raises(ConfigError, match="there is no program nsys on the PATH; install Nsight Systems"):
        check_profiler(config.learner)
    (tmp_path / "nsys").touch(0o700)
    check_profiler(config.learner)
    with pytest.raises(ConfigError, match="nsight records GPUs, and no rank has one"):
        check_profiler(nsight_config(tmp_path, policy={"gpus_per_rank": 0}).learner)
    check_profiler(nsight_config(tmp_path, profile={"tool": "nsight"}).learner)
