"""A learner killed at a named point: its successor ends with the same weights, and nothing is trained twice or lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conftest import RedisProcess
from learner_runs import (
    GROUPS_PER_STEP,
    NUM_STEPS,
    Outcome,
    fill_queue,
    forget_run,
    make_config,
    outcome,
    run_learner,
)
from penstock.config.run import RunConfig
from tiny_model import make_tiny_qwen2

KILLED = -9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path, redis_process: RedisProcess) -> RunConfig:
    return make_config(tmp_path_factory.mktemp("runs"), model, redis_process.url, "undisturbed")


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig) -> Outcome:
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return outcome(config)


LONG = [pytest.param(point, marks=pytest.mark.long) for point in ("after_read:3", "before_flush", "after_commit")]


@pytest.mark.parametrize("crash_at", ["mid_step:3", pytest.param("after_flush", marks=pytest.mark.long), *LONG])
def test_a_killed_learner_is_continued_exactly(
    crash_at: str, tmp_path: Path, model: Path, redis_process: RedisProcess, undisturbed: Outcome
) -> None:
    config = make_config(tmp_path, model, redis_process.url, f"crash-{crash_at.partition(':')[0]}")
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, crash_at)
    assert code == KILLED, output[-3000:]
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    recovered = outcome(config)
    assert recovered.digests[NUM_STEPS] == undisturbed.digests[NUM_STEPS]
    assert recovered.ledger == undisturbed.ledger == [[1, GROUPS_PER_STEP * NUM_STEPS]]
    assert recovered.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert recovered.stat.conservation_error == 0
    assert recovered.stat.term == 2
    assert recovered.feed_positions == {"train": GROUPS_PER_STEP * NUM_STEPS}


@pytest.mark.long
def test_a_redis_that_lost_the_run_is_refused(config: RunConfig, undisturbed: Outcome) -> None:
    """Prompt ids would start again from 1, and the ledger holds those."""
    assert undisturbed.feed_positions == {"train": GROUPS_PER_STEP * NUM_STEPS}
    asyncio.run(forget_run(config))
    code, output = run_learner(config)
    assert code == 1
    assert "this Redis is not the one of the checkpoint, or has lost everything" in output
