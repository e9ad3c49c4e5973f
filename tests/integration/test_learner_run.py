"""A real learner: Ray, FSDP2 ranks over gloo, both placements."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conftest import RedisProcess
from learner_runs import GROUPS_PER_STEP, NUM_STEPS, fill_queue, make_config, outcome, run_learner
from tiny_model import make_tiny_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=5)


def test_both_placements_train_the_same_two_rank_policy(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    """GRPO with a KL term, so that the reference role takes part; the placement must not change a single bit."""
    algorithm = {"correction": {"mode": "decoupled"}, "kl": {"placement": "loss"}}
    outcomes = []
    for placement in ("standalone", "split-collocate"):
        config = make_config(
            tmp_path, model, redis_process.url, placement,
            placement=placement, policy={"num_ranks": 2}, algorithm=algorithm,
        )  # fmt: skip
        asyncio.run(fill_queue(config))
        code, output = run_learner(config)
        assert code == 0, output[-3000:]
        outcomes.append(outcome(config))
    first, second = outcomes
    common = first.digests.keys() & second.digests.keys()
    assert {0, NUM_STEPS} <= common, "a version may be skipped for a newer one, but neither the first nor the last"
    assert [first.digests[step] for step in common] == [second.digests[step] for step in common]
    assert first.losses == second.losses
    assert len(set(first.digests.values())) == len(first.digests), "every step changed the weights"
    assert first.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert first.stat.conservation_error == 0


@pytest.mark.long
def test_a_starved_learner_acknowledges_early_and_knows_its_redis(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    config = make_config(
        tmp_path, model, redis_process.url, "starved", checkpoint={"every_steps": 100}, batch_timeout_s=4
    )
    asyncio.run(fill_queue(config, GROUPS_PER_STEP))
    code, output = run_learner(config)
    assert code == 1 and "step 2 has 0 of 2 groups" in output, output[-3000:]
    assert outcome(config).stat.trained == GROUPS_PER_STEP, "the one step is covered by a checkpoint before its time"

    lost = config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis_process.url[:-1] + "1"})})
    code, output = run_learner(lost)
    assert code == 1 and "this Redis is not the one of the checkpoint" in output, output[-3000:]
