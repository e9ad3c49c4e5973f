"""Runs of a real learner: Ray, FSDP2 ranks over gloo, both placements."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.codec import encode_group
from penstock.config.run import RunConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.step_history import read_steps
from penstock.store.redis_client import connect
from support.groups import make_group
from support.learner_runs import (
    GROUPS_PER_STEP,
    KILLED,
    NUM_STEPS,
    Outcome,
    append_groups,
    feed_prompts,
    fill_queue,
    make_config,
    outcome,
    ppo,
    queue_stat,
    ranks_of,
    run_learner,
)
from support.redis_server import RedisProcess

PLACEMENTS = ("standalone", "split-collocate")
pytestmark = pytest.mark.timeout(1500)  # a learner starts four processes that import torch, and the machine may be busy


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["policy"]


@pytest.fixture(scope="module")
def classifier(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["scalar"]


def trained(folder: Path, model: Path, redis: RedisProcess, run: str, **learner: Any) -> Outcome:
    config = make_config(folder, model, redis.url, run, **learner)
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return outcome(config)


@dataclass(frozen=True)
class PpoRun:
    """A PPO run without deaths: standalone placement. Its policy was validated."""

    run: str
    num_ranks: int
    """Ranks of each trained role."""
    outcome: Outcome


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids="{}-rank".format)
def undisturbed_ppo(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    classifier: Path,
    redis_process: RedisProcess,
) -> PpoRun:
    folder, num_ranks, run = tmp_path_factory.mktemp("ppo"), request.param, f"ppo-undisturbed-{request.param}"
    config = make_config(folder, model, redis_process.url, run, **ppo(classifier, num_ranks))
    asyncio.run(fill_queue(config))
    asyncio.run(validate_once(config, "validation-math-0"))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return PpoRun(run, num_ranks, outcome(config))


async def validate_once(config: RunConfig, evaluation_id: str) -> None:
    """Record an evaluation of three groups and keep them, as a rollout server does."""
    client = connect(config.redis)
    queue = RedisReplayQueue(client, config.run, config.replay)
    await queue.create_evaluation(evaluation_id, [b"q"] * 3)
    for lease in await queue.lease("rollout-0", 3):
        group = make_group(lease.prompt_id)
        rewards = [trajectory.reward for trajectory in group.trajectories]
        await queue.record_evaluation(evaluation_id, lease, rewards, 0, 0, "test", kept_group=encode_group(group))
    await client.aclose()


async def test_the_reward_model_scores_a_validation_during_training(
    undisturbed_ppo: PpoRun, redis_process: RedisProcess
) -> None:
    client = connect(RedisConfig(url=redis_process.url))
    history = await RedisReplayQueue(client, undisturbed_ppo.run, ReplayConfig()).evaluation_history()
    await client.aclose()
    score = history["test/reward_model/mean@4-0"]
    assert abs(score) > 1e-4
    expected = history["validation-math-0"] + 0.1 * score
    assert history["test/combined_reward/mean@4-0"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.long  # the test of PPO below compares the placements too
def test_both_placements_train_the_same_two_rank_policy(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    """GRPO with a KL term, so that there is a reference role. Neither the placement nor profiling a step may change a
    single bit. The reference's forward passes for the next step run beside the update."""
    algorithm = {"correction": {"mode": "decoupled"}, "kl": {"placement": "loss"}}
    profile = {"steps": [2], "ranks": [1], "ray_timeline": True}
    first, second = (
        trained(
            tmp_path,
            model,
            redis_process,
            placement,
            placement=placement,
            policy={"num_ranks": 2},
            algorithm=algorithm,
            profile=wanted,
        )  # fmt: skip
        for placement, wanted in zip(PLACEMENTS, ({}, profile), strict=True)
    )
    assert not list(tmp_path.glob(f"**/{PLACEMENTS[0]}/profiles"))
    (profiles,) = tmp_path.glob(f"**/{PLACEMENTS[1]}/profiles")
    assert {path.name for path in profiles.iterdir()} == {"step-2-policy-1.json.gz", "ray-timeline.json"}
    assert forwards_run_ahead(profiles / "ray-timeline.json")
    common = first.digests.keys() & second.digests.keys()
    assert {0, NUM_STEPS} <= common, "a version may be skipped for a newer one, but neither the first nor the last"
    assert [first.digests[step] for step in common] == [second.digests[step] for step in common]
    assert first.losses == second.losses
    assert len(set(first.digests.values())) == len(first.digests), "every step changed the weights"
    assert first.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert first.stat.conservation_error == 0


def forwards_run_ahead(timeline: Path) -> bool:
    """Whether the reference began a batch before the policy's update on the previous batch had ended."""
    calls = sorted(json.loads(timeline.read_text()), key=lambda call: call["ts"])
    references = [call["ts"] for call in calls if call["cat"] == "task::ReferenceWorker.log_probs"]
    updates = [call["ts"] + call["dur"] for call in calls if call["cat"] == "task::PolicyWorker.update"]
    assert len(references) == NUM_STEPS and len(updates) == NUM_STEPS * 2
    return any(begun < ended for begun, ended in zip(references[1:], updates[::2], strict=False))


def test_both_placements_train_the_same_ppo_also_through_the_deaths_of_the_learner_and_of_ranks(
    tmp_path: Path, model: Path, classifier: Path, redis_process: RedisProcess, undisturbed_ppo: PpoRun
) -> None:
    """The learner is killed when the checkpoint of step 2 is durable and not acknowledged, and a second one continues.
    Then a rank of the critic dies, and policy and critic rewind to that checkpoint. Then the reward model's rank dies
    and is replaced within the step. With one rank, policy and critic share a pool."""
    num_ranks = undisturbed_ppo.num_ranks
    settings = ppo(classifier, num_ranks)
    settings["policy"] |= {"pool": "critic" if num_ranks == 1 else ""}
    config = make_config(
        tmp_path, model, redis_process.url, f"ppo-deaths-{num_ranks}", placement="split-collocate", **settings
    )
    asyncio.run(feed_prompts(config, GROUPS_PER_STEP * NUM_STEPS))
    asyncio.run(append_groups(config, GROUPS_PER_STEP * 2))
    code, output = run_learner(config, "after_flush")
    assert code == KILLED, output[-3000:]
    assert list(config.folder.glob("checkpoints/term-*-step-*2")) and queue_stat(config).trained == 0

    def kill_a_rank(processes: list[psutil.Process]) -> bool:
        if "training from step 2 under term 2" not in (config.folder / "learner.log").read_text():
            return False
        if not (ranks := ranks_of("CriticWorker", processes)):  # it may be younger than the list of processes
            return False
        assert ranks[-1].nice() == psutil.Process().nice(), "Ray would let ranks wait for all else on busy CPUs"
        ranks[-1].kill()
        asyncio.run(append_groups(config, GROUPS_PER_STEP * (NUM_STEPS - 2)))
        return True

    code, output = run_learner(config, "reward_model.0:3", kill_a_rank)
    assert code == 0, output[-3000:]
    for role in ("reward_model", "critic"):
        assert output.count(f"the {role} role is restarted") == 1, output[-3000:]
    assert "the policy role is restarted" not in output
    first, second = undisturbed_ppo.outcome, outcome(config)
    assert first.losses == second.losses
    assert first.critic_losses == second.critic_losses
    assert first.rewards == second.rewards
    assert first.digests[NUM_STEPS] == second.digests[NUM_STEPS]
    assert first.state_hashes == second.state_hashes
    assert first.ledger == second.ledger == [[1, GROUPS_PER_STEP * NUM_STEPS]]
    assert second.stat.conservation_error == 0
    assert second.feed_positions == {"train": GROUPS_PER_STEP * NUM_STEPS}
    assert len(first.critic_losses) == len(set(first.critic_losses)) == NUM_STEPS
    assert all(reward != int(reward * 8) / 8 for reward in first.rewards), (
        "the reward model took part: rewards by rules alone are multiples of 1/8"
    )
    assert second.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert (first.stat.term, second.stat.term) == (1, 3), "one for each learner, and one after the critic's death"


@pytest.mark.long
def test_a_dead_policy_and_a_dead_reference_are_replaced(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    """A rank of the policy dies while it waits for the second batch. There is no checkpoint yet, so it starts from the
    model folder. The reference may have had the second batch by then, and dies with the third or the fourth."""
    settings: dict[str, Any] = {"policy": {"num_ranks": 2}, "algorithm": {"kl": {"placement": "loss"}}}
    undisturbed = trained(tmp_path, model, redis_process, "lives", **settings)
    config = make_config(tmp_path, model, redis_process.url, "dies", **settings, checkpoint={"every_steps": 100})
    asyncio.run(feed_prompts(config, GROUPS_PER_STEP * NUM_STEPS))
    asyncio.run(append_groups(config, GROUPS_PER_STEP))

    def kill_a_rank(processes: list[psutil.Process]) -> bool:
        steps = config.folder / "metrics.jsonl"
        if not steps.is_file() or not steps.read_text():
            return False
        ranks_of("PolicyWorker", processes)[-1].kill()
        asyncio.run(append_groups(config, GROUPS_PER_STEP * (NUM_STEPS - 1)))
        return True

    code, output = run_learner(config, "reference.0:5", kill_a_rank)
    assert code == 0, output[-3000:]
    for role in ("policy", "reference"):
        assert output.count(f"the {role} role is restarted") == 1, output[-3000:]
    recovered = outcome(config)
    assert recovered.losses == undisturbed.losses
    assert recovered.digests[NUM_STEPS] == undisturbed.digests[NUM_STEPS]
    assert recovered.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert recovered.stat.conservation_error == 0


@pytest.mark.long
def test_a_role_that_keeps_dying_ends_the_learner_with_one_line(
    tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    config = make_config(tmp_path, model, redis_process.url, "keeps-dying", max_role_restarts=2)
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, "policy.0")
    assert code == 1
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert "a rank of the policy role died in update; it was restarted 2 times in a row" in line


@pytest.mark.long
@pytest.mark.parametrize("undisturbed_ppo", [2], indirect=True)
def test_a_checkpoint_of_two_ranks_is_continued_by_one_and_by_four(
    tmp_path: Path, model: Path, classifier: Path, redis_process: RedisProcess, undisturbed_ppo: PpoRun
) -> None:
    settings = ppo(classifier)
    run: RunConfig | None = None
    for num_steps, num_ranks in ((2, 2), (3, 1), (NUM_STEPS, 4)):
        share = {"sequence_parallel": min(num_ranks, 2)}  # of two and four ranks, two share each sequence
        critic = settings["critic"] | {"num_ranks": num_ranks} | share
        ranks = {"policy": {"num_ranks": num_ranks}, "critic": critic} | share
        config = make_config(tmp_path, model, redis_process.url, "elastic", **(settings | ranks), num_steps=num_steps)
        if run is None:
            asyncio.run(fill_queue(config))
        run = config
        code, output = run_learner(config)
        assert code == 0, output[-3000:]
    assert run is not None
    continued = outcome(run)
    assert continued.losses == pytest.approx(undisturbed_ppo.outcome.losses, abs=1e-5)
    assert continued.critic_losses == pytest.approx(undisturbed_ppo.outcome.critic_losses, abs=1e-5)
    assert continued.stat.trained == GROUPS_PER_STEP * NUM_STEPS


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
    assert outcome(config).stat.trained == GROUPS_PER_STEP, "an early checkpoint covers the one step"
    [step] = read_steps(config.folder)
    assert step["memory_peak_gib"] > 0 and step["advantage_min"] <= step["advantage_max"] and "mfu" not in step

    lost = config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis_process.url[:-1] + "1"})})
    code, output = run_learner(lost)
    assert code == 1 and "this Redis is not the one that the checkpoint was written with" in output, output[-3000:]


@pytest.mark.long
def test_a_rank_that_hangs_is_replaced(tmp_path: Path, model: Path, redis_process: RedisProcess) -> None:
    settings: dict[str, Any] = {"policy": {"num_ranks": 2}}
    undisturbed = trained(tmp_path, model, redis_process, "runs", **settings)
    config = make_config(tmp_path, model, redis_process.url, "hangs", **settings, rank_timeout_s=20)
    asyncio.run(feed_prompts(config, GROUPS_PER_STEP * NUM_STEPS))
    asyncio.run(append_groups(config, GROUPS_PER_STEP))

    def stop_a_rank(processes: list[psutil.Process]) -> bool:
        steps = config.folder / "metrics.jsonl"
        if not steps.is_file() or not steps.read_text():
            return False
        ranks_of("PolicyWorker", processes)[-1].suspend()
        asyncio.run(append_groups(config, GROUPS_PER_STEP * (NUM_STEPS - 1)))
        return True

    code, output = run_learner(config, interfere=stop_a_rank)
    assert code == 0, output[-3000:]
    assert "did not finish in 20 s" in output
    recovered = outcome(config)
    assert recovered.losses == undisturbed.losses
    assert recovered.digests[NUM_STEPS] == undisturbed.digests[NUM_STEPS]
