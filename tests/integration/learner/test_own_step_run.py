"""Runs of a real learner with a step and roles of the user's own: both placements, deaths of ranks in the step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config.run import RunConfig
from penstock_learner.checkpoints import shards_folder
from support.learner_runs import GROUPS_PER_STEP, NUM_STEPS, fill_queue, make_config, outcome, run_learner, state_hash
from support.redis_server import RedisProcess

STEP = '''
from penstock_learner.dataflow import *
from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.frozen import ReferenceWorker

class SecondCritic(CriticWorker):
    """A trained worker of the user's own file."""

class Teacher(ReferenceWorker):
    """A frozen one."""

async def ahead(batch, roles, context):
    return batch.with_token_fields(teacher_log_probs=await roles.teacher.log_probs(batch))

async def step(batch, roles, context):
    batch, values, second = await gather_all(
        context.ahead(), roles.critic.values(batch), roles.second_critic.values(batch)
    )
    batch = batch.with_token_fields(values=(values + second) / 2, second_values=second)
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    gap = batch["teacher_log_probs"] - batch["behaviour_log_probs"]
    batch = batch.with_token_fields(advantages=(batch["advantages"] + 0.01 * gap) * batch["loss_mask"])
    parts = context.minibatches(batch)
    await gather_all(
        update_policy(roles.policy, parts, context),
        update_critic(roles.critic, parts, context),
        update_critic(roles.second_critic, parts[:1], context),
    )
    return batch, {"num_parts": len(parts)}
'''


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "own_step.py"
    file.write_text(STEP)
    return {
        "step": f"{file}:step",
        "ahead": f"{file}:ahead",
        "policy": {"num_ranks": 2},
        "critic": {"lr": 1e-3},
        "roles": {
            "second_critic": {"worker": f"{file}:SecondCritic", "lr": 1e-3},
            "teacher": {"worker": f"{file}:Teacher", "pool": "policy"},
        },
        "algorithm": {"advantage": {"name": "gae"}, "correction": {"mode": "bypass"}},
        "minibatches_per_step": 2,
        "rank_timeout_s": 240,
        "checkpoint": {"every_steps": 1},
    }


def second_critic_hash(config: RunConfig) -> str:
    newest = sorted((config.folder / "checkpoints").glob("term-*-step-*"))[-1]
    return state_hash(shards_folder(newest, "second_critic"))


@pytest.mark.long
def test_ranks_that_die_in_an_own_step_change_nothing(
    tmp_path: Path, tiny_models: dict[str, Path], redis_process: RedisProcess, settings: dict[str, Any]
) -> None:
    """The teacher dies in its fourth batch and is restarted within the call. The second critic dies in its fourth
    update, when the policy's may have been made: all trained roles rewind to the newest checkpoint."""
    runs = []
    for placement, crash_at in (("standalone", ""), ("split-collocate", "teacher.0:4,second_critic.0:4")):
        config = make_config(
            tmp_path, tiny_models["policy"], redis_process.url, f"own-{placement}", placement=placement, **settings
        )
        asyncio.run(fill_queue(config))
        code, output = run_learner(config, crash_at)
        assert code == 0, output[-3000:]
        runs.append((outcome(config), second_critic_hash(config)))
        for role in ("teacher", "second_critic"):
            assert output.count(f"the {role} role is restarted") == (1 if crash_at else 0), output[-3000:]
        assert "the policy role is restarted" not in output
    (undisturbed, second), (disturbed, second_of_disturbed) = runs
    assert disturbed.losses == undisturbed.losses
    assert disturbed.digests[NUM_STEPS] == undisturbed.digests[NUM_STEPS]
    assert disturbed.state_hashes == undisturbed.state_hashes and second == second_of_disturbed
    for run in (undisturbed, disturbed):
        assert run.stat.trained == GROUPS_PER_STEP * NUM_STEPS and run.stat.conservation_error == 0
        assert run.ledger == [[1, GROUPS_PER_STEP * NUM_STEPS]], "each prompt is in the ledger once"
    assert (undisturbed.stat.term, disturbed.stat.term) == (1, 2)


@pytest.mark.long
def test_an_own_step_that_fails_ends_the_learner_and_a_corrected_one_continues(
    tmp_path: Path, tiny_models: dict[str, Path], redis_process: RedisProcess
) -> None:
    file = tmp_path / "failing.py"
    step = STEP.replace(
        "    parts = context", "    if context.step == 3:\n        raise KeyError('mine')\n    parts = context"
    )
    settings = {"step": f"{file}:step", "ahead": f"{file}:ahead", "critic": {}, "roles": {}}
    own = {name: {"worker": worker} for name, worker in (("second_critic", "critic"), ("teacher", "reference"))}
    algorithm = {"advantage": {"name": "gae"}, "correction": {"mode": "bypass"}}
    config = make_config(
        tmp_path, tiny_models["policy"], redis_process.url, "own-fails", **(settings | {"roles": own}),
        algorithm=algorithm, rank_timeout_s=240,
    )  # fmt: skip
    asyncio.run(fill_queue(config))
    file.write_text(step)
    code, output = run_learner(config)
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert code != 0 and "failing.py:step failed: KeyError: 'mine'" in line and "failing.py:" in line.split("mine")[1]
    file.write_text(STEP)
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    done = outcome(config)
    assert done.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert done.ledger == [[1, GROUPS_PER_STEP * NUM_STEPS]]
