"""A step over real workers in this process: what runs at the same time, and which reward trains."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from groups import make_group
from local_roles import make_step
from penstock.errors import ConfigError, TrainingDiverged
from penstock.trajectory import Group
from penstock_learner.skipped_steps import SkippedSteps
from penstock_learner.step_metrics import mean_rewards
from tests.scripted_engine import make_tokenizer_folder, spelled
from tiny_model import make_tiny_qwen2

pytestmark = pytest.mark.usefixtures("one_rank")


def groups_of(*data_sources: str) -> list[Group]:
    return [replace(make_group(number), data_source=source) for number, source in enumerate(data_sources, start=1)]


async def test_all_forwards_run_at_the_same_time_and_so_do_the_updates(tiny_models: dict[str, Path]) -> None:
    gates = {"forward": asyncio.Barrier(4), "update": asyncio.Barrier(2)}
    step = make_step(
        tiny_models, gates,
        algorithm={"advantage": {"name": "gae"}, "kl": {"placement": "reward"}},
        critic={}, reward_model={"path": str(tiny_models["scalar"])},
    )  # fmt: skip
    metrics = await step.run(groups_of("a", "b"), 1, 0, 0.1)
    assert metrics["critic_loss"] > 0 and metrics["grad_norm"] > 0


async def test_the_reward_model_adds_or_replaces_for_its_data_sources(tiny_models: dict[str, Path]) -> None:
    groups = groups_of("chat/a", "rules")
    rules = [group.mean_reward for group in groups]

    async def mean_reward(**settings: Any) -> float:
        step = make_step(tiny_models, reward_model={"path": str(tiny_models["scalar"]), **settings})
        overall = (await step.run(groups, 1, 0, 0.0))["reward_mean"]
        by_source = mean_rewards(groups, step.rewards)
        assert by_source.keys() == {"chat/a", "rules"}
        assert sum(by_source.values()) / 2 == pytest.approx(overall, abs=1e-5)
        if settings.get("data_sources") == ["chat*"]:
            assert by_source["rules"] == pytest.approx(rules[1], abs=1e-5)
        return overall

    score_of_chat = 2 * await mean_reward(combine="replace", data_sources=["chat*"]) - rules[1]
    assert abs(score_of_chat - rules[0]) > 1e-3
    added = await mean_reward(coefficient=0.5, data_sources=["chat*"])
    assert 2 * added == pytest.approx(rules[0] + 0.5 * score_of_chat + rules[1], abs=1e-5)
    assert await mean_reward(data_sources=["none"]) == pytest.approx(sum(rules) / 2)
    everything = await mean_reward(combine="replace")
    score_of_rules = 2 * await mean_reward(combine="replace", data_sources=["rules"]) - rules[0]
    assert 2 * everything == pytest.approx(score_of_chat + score_of_rules, abs=1e-5)


async def test_a_judge_is_asked_after_the_trajectory(tmp_path: Path) -> None:
    """The score is worked out again by a plain forward over prompt, response and question."""
    folder = make_tiny_qwen2(tmp_path / "judge", seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_tokenizer_folder(tmp_path / "tokenizer") / name, folder / name)
    models = {"policy": folder}
    (group,) = groups = groups_of("chat")
    judge = {"question": "good", "yes": "y", "no": "n"}
    step = make_step(models, reward_model={"path": str(folder), "judge": judge, "combine": "replace", "coefficient": 2})
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = []
    for trajectory in group.trajectories:
        ids = torch.tensor([[*group.prompt_token_ids.tolist(), *trajectory.token_ids.tolist(), *spelled("good")]])
        expected.append(2 * plain(ids).logits[0, -1, spelled("yn")].softmax(0)[0].item())
    assert max(expected) - min(expected) > 0.01
    assert (await step.run(groups, 1, 0, 0.0))["reward_mean"] == pytest.approx(sum(expected) / 4, abs=1e-5)
    with pytest.raises(ConfigError, match="must be two different tokens"):
        make_step(models, reward_model={"path": str(folder), "judge": judge | {"no": "no"}})


async def test_a_critic_that_cannot_step_ends_the_run_although_the_policy_can(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Rewards whose squares overflow: the value loss is infinite, the whitened advantages are as ever."""
    groups = groups_of("good", "bad")
    hit = tuple(replace(trajectory, reward=1e30) for trajectory in groups[1].trajectories)
    groups[1] = replace(groups[1], trajectories=hit)
    step = make_step(tiny_models, algorithm={"advantage": {"name": "gae"}}, critic={})
    step.skipped = SkippedSteps(2, tmp_path)
    metrics = await step.run(groups, 1, 0, 0.0)
    assert (metrics["skipped"], metrics["critic_skipped"]) == (0, 1)
    with pytest.raises(TrainingDiverged, match=r"the critic's loss of prompts .*2.* at step 2, the 2. such step"):
        await step.run(groups, 2, 0, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]


async def test_the_greedy_sample_is_scored_and_not_trained(tiny_models: dict[str, Path]) -> None:
    group = make_group(1, num_samples=3)
    greedy = replace(group.trajectories[0], is_baseline=True, reward=10.0)
    marked = replace(group, trajectories=(*group.trajectories[1:], greedy))
    algorithm = {"advantage": {"name": "remax"}, "loss": {"name": "reinforce"}, "correction": {"mode": "bypass"}}
    step = make_step(tiny_models, algorithm=algorithm)
    metrics = await step.run([marked], 1, 0, 0.0)
    trained = group.trajectories[1:]
    assert metrics["num_sequences"] == 2
    assert metrics["reward_mean"] == pytest.approx(sum(t.reward for t in trained) / 2)
    assert mean_rewards([marked], step.rewards)[group.data_source] == pytest.approx(metrics["reward_mean"])
    assert metrics["response_tokens"] == sum(len(t.token_ids) for t in trained)
    # A baseline left over from another config does not touch an algorithm that compares without it.
    plain, left_over = [
        await make_step(tiny_models, algorithm={"correction": {"mode": "bypass"}}).run([one], 1, 0, 0.0)
        for one in (replace(group, trajectories=trained), marked)
    ]
    assert left_over["loss"] == plain["loss"]
