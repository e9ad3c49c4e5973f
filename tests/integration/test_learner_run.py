"""A real learner: Ray, FSDP2 ranks over gloo, both placements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conftest import RedisProcess
from learner_runs import GROUPS_PER_STEP, NUM_STEPS, Outcome, fill_queue, make_config, outcome, run_learner
from tiny_model import make_tiny_classifier, make_tiny_qwen2

PLACEMENTS = ("standalone", "split-collocate")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"), seed=6)


def ppo(classifier: Path) -> dict[str, Any]:
    """Learner settings of PPO with a critic, on rules and a reward model."""
    return {
        "algorithm": {"advantage": {"name": "gae", "lam": 0.95}, "kl": {"placement": "none"}},
        "critic": {"num_ranks": 2, "lr": 1e-3},
        "reward_model": {"path": str(classifier), "combine": "add", "coefficient": 0.1},
    }


def trained(folder: Path, model: Path, redis: RedisProcess, run: str, **learner: Any) -> Outcome:
    config = make_config(folder, model, redis.url, run, **learner)
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return outcome(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=5)


def test_both_placements_train_the_same_two_rank_policy(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    """GRPO with a KL term, so that the reference role takes part; the placement must not change a single bit."""
    algorithm = {"correction": {"mode": "decoupled"}, "kl": {"placement": "loss"}}
    first, second = (
        trained(
            tmp_path, model, redis_process, placement, placement=placement, policy={"num_ranks": 2}, algorithm=algorithm
        )
        for placement in PLACEMENTS
    )
    common = first.digests.keys() & second.digests.keys()
    assert {0, NUM_STEPS} <= common, "a version may be skipped for a newer one, but neither the first nor the last"
    assert [first.digests[step] for step in common] == [second.digests[step] for step in common]
    assert first.losses == second.losses
    assert len(set(first.digests.values())) == len(first.digests), "every step changed the weights"
    assert first.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert first.stat.conservation_error == 0


def test_both_placements_train_the_same_ppo_with_critic_and_reward_model(
    tmp_path: Path, model: Path, classifier: Path, redis_process: RedisProcess
) -> None:
    """Two ranks of each role that trains; the policy is held for a step, while the critic learns."""
    first, second = (
        trained(
            tmp_path, model, redis_process, f"ppo-{placement}", placement=placement, **ppo(classifier),
            policy={"num_ranks": 2}, critic_warmup_steps=1,
        )
        for placement in PLACEMENTS
    )  # fmt: skip
    assert first.losses == second.losses
    assert first.critic_losses == second.critic_losses
    assert first.rewards == second.rewards
    assert first.digests[NUM_STEPS] == second.digests[NUM_STEPS]
    assert len(first.critic_losses) == len(set(first.critic_losses)) == NUM_STEPS
    assert all(reward != int(reward * 8) / 8 for reward in first.rewards), "rules alone give eighths"


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
