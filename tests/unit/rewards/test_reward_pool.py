"""The pool of reward processes is filled before the first response, and never holds more than it may."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry

from penstock.config.rollout import RewardConfig
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.pool import RewardPool
from penstock_rollout.rewards.scorer import Scorer
from support.processes import command_of

FUNCTION = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "pid": os.getpid()}
"""


def workers() -> set[int]:
    """The reward processes of this one. A child that has ended, maybe of another test, has no command any more."""
    children = psutil.Process().children()
    return {child.pid for child in children if "penstock_rollout.rewards.pool" in command_of(child)}


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    config = RewardConfig.model_validate({"function_file": str(file), "num_processes": 3})
    return Scorer(config, RolloutMetrics(CollectorRegistry()))


async def filled(scorer: Scorer) -> None:
    assert scorer._filling is not None
    await asyncio.wait_for(scorer._filling, 60)


async def test_all_processes_are_ready_before_the_first_response(scorer: Scorer) -> None:
    try:
        await scorer.check()
        scorer.begin()
        await filled(scorer)
        started = workers()
        assert len(started) == 3
        scores = await asyncio.gather(*(scorer.score(f"prompt {i}", "a", ["x"], "x", {}) for i in range(12)))
        assert {each.parts["pid"] for (each,) in scores} <= started
        assert workers() == started
    finally:
        await scorer.close()
    assert not workers()


async def test_responses_that_come_meanwhile_start_no_process_too_many(scorer: Scorer) -> None:
    try:
        await scorer.check()
        scorer.begin()
        await asyncio.gather(*(scorer.score(f"prompt {i}", "a", ["x"], "x", {}) for i in range(12)))
        await filled(scorer)
        assert len(workers()) == 3
    finally:
        await scorer.close()


async def test_closing_ends_a_pool_that_is_being_filled(scorer: Scorer) -> None:
    await scorer.check()
    scorer.begin()
    await asyncio.sleep(0.05)
    await scorer.close()
    assert not workers()


async def test_a_reward_that_cannot_be_built_ends_the_filling_and_keeps_its_process() -> None:
    pool = RewardPool(2)
    broken: dict[str, Any] = {"kind": "function", "file": "/nowhere.py", "name": "compute_score"}
    try:
        await pool.fill([json.dumps(broken)])
        assert len(workers()) == 1
    finally:
        await pool.close()
    assert not workers()
