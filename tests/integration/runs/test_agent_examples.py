"""The shipped examples: GroupMaker makes groups from their datasets, with the real engine and their configs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.feed.datasets import read_prompts
from penstock.replay.queue_types import Lease
from penstock.trajectory import Group, Prompt, Sampling, Trajectory
from penstock_rollout.agents.loops import Agents
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.groups.producer import GroupMaker
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization

ROOT = Path(__file__).parents[3]
NUM_PROMPTS, NUM_SAMPLES = 12, 4
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ran:
    config: RunConfig
    prompts: list[Prompt]
    groups: list[Group]
    tokenization: Tokenization
    registry: CollectorRegistry

    def samples(self) -> list[tuple[Prompt, Group, Trajectory]]:
        return [(p, g, t) for p, g in zip(self.prompts, self.groups, strict=True) for t in g.trajectories]

    def turns(self, trajectory: Trajectory) -> list[tuple[bool, str]]:
        """The turns in order: whether the model sampled it, and its text with special tokens."""
        turns: list[tuple[bool, list[int]]] = []
        for token, mask in zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
            if not turns or turns[-1][0] is not bool(mask):
                turns.append((bool(mask), []))
            turns[-1][1].append(token)
        return [(said, self.tokenization.tokenizer.decode(ids)) for said, ids in turns]


@asynccontextmanager
async def started(config: RunConfig) -> AsyncIterator[tuple[GroupMaker, CollectorRegistry]]:
    registry = CollectorRegistry()
    metrics = RolloutMetrics(registry)
    engine = create_engine(config.rollout.engine, config.model.path, config.model.dtype, config.seed)
    tokenization = Tokenization(config.model.path)
    agents = Agents.load(config.rollout.agents, config.rollout.engine.max_model_len, tokenization)
    scorer = Scorer(config.rollout.reward, metrics)
    await engine.start(policy_version=3)
    try:
        yield GroupMaker("test", "rollout-0", engine, tokenization, scorer, metrics, agents), registry
    finally:
        await engine.stop()
        await scorer.close()


async def run_example(name: str) -> Ran:
    config = load_config(ROOT / "examples" / name / "demo.yaml", ["--rollout.engine.name", "torch"])
    assert config.demo.train_file is not None
    sampling = Sampling(temperature=1.0, max_tokens=config.demo.max_tokens, seed=11)
    read = read_prompts(config.demo.train_file, num_samples=NUM_SAMPLES, sampling=sampling)
    prompts = list(islice(read, NUM_PROMPTS))
    async with started(config) as (maker, registry):
        leases = [Lease(prompt_id=index, attempt=1, payload=b"") for index in range(NUM_PROMPTS)]
        groups = await asyncio.gather(*map(maker.make, leases, prompts))
        return Ran(config, prompts, list(groups), maker.tokenization, registry)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples are relative to the repository."""
    monkeypatch.chdir(ROOT)


def assert_log_probs(ran: Ran) -> None:
    """The log-probs equal those of one forward pass over the whole trajectory, so its ids are those the model saw."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ran.config.model.path, dtype="float32").eval()
    for _, group, trajectory in ran.samples():
        prompt, response = group.prompt_token_ids.tolist(), trajectory.token_ids.tolist()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        mask = torch.tensor(trajectory.loss_mask).bool()
        found = torch.tensor(trajectory.log_probs)
        torch.testing.assert_close(found[mask], expected[mask], atol=TOLERANCE, rtol=0)
        assert not found[~mask].any()


async def test_single_turn() -> None:
    ran = await run_example("arithmetic")
    assert all(trajectory.loss_mask.all() for _, _, trajectory in ran.samples())
    assert {trajectory.reward for _, _, trajectory in ran.samples()} == {0.0, 1.0}
    assert_log_probs(ran)


async def test_calculator_tool() -> None:
    ran = await run_example("calculator_tool")
    num_calls = 0
    for prompt, _, trajectory in ran.samples():
        turns = ran.turns(trajectory)
        if len(turns) > 1:
            (_, call), (said, answer), *rest = turns
            expression = call.removesuffix("<eos>").strip("[]")
            assert not said
            num_calls += 1
            if expression.replace("+", "").isdigit() and len(rest) == 1:
                assert answer == f"{sum(map(int, expression.split('+')))}="
        last = turns[-1][1].removesuffix("<eos>")
        assert trajectory.reward == float(last == prompt.ground_truth)
    assert num_calls, "the model calls the tool in about four of ten samples"
    assert num_calls < len(ran.samples())
    counted = ran.registry.get_sample_value("penstock_tool_calls_total", {"tool": "calculator", "result": "ok"})
    assert counted is not None
    assert counted >= 1
    assert_log_probs(ran)


async def test_feedback_interaction() -> None:
    ran = await run_example("feedback_interaction")
    outcomes = set()
    for prompt, _, trajectory in ran.samples():
        question = prompt.messages[0][1]
        turns = ran.turns(trajectory)
        first = turns[0][1].removesuffix("<eos>")
        if first == prompt.ground_truth:
            assert (len(turns), trajectory.reward) == (1, 1.0)
            outcomes.add("right at once")
            continue
        assert len(turns) == 3, "a wrong answer gets feedback and a second try"
        assert turns[1] == (False, f"!{question}")
        last = turns[2][1].removesuffix("<eos>")
        assert trajectory.reward == (0.5 if last == prompt.ground_truth else 0.0)
        assert trajectory.reward_parts["turn_1"] == 0.0
        outcomes.add("wrong at first")
    assert outcomes == {"right at once", "wrong at first"}
    assert_log_probs(ran)
