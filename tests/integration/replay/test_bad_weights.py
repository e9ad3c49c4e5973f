"""Bad weights on every server: leasing pauses, no prompt is dead-lettered, and good weights train every prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.rollout import AgentsConfig, RolloutConfig
from penstock.config.service import BreakerConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import RunControl
from penstock.trajectory import Prompt, Sampling
from penstock_learner.weights.publisher import WeightPublisher
from penstock_rollout.agents.loops import Agents
from penstock_rollout.engines.engine import Engine
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import SampleScore
from penstock_rollout.tokenization import Tokenization
from support.engine_member import HOST, config_of, member
from support.tiny_models import make_tiny_qwen2

NUM_PROMPTS = 40
REPLAY = ReplayConfig(
    groups_per_step=NUM_PROMPTS,
    max_attempts=2,
    breaker=BreakerConfig(non_finite_failures=8, probe_s=600),
    lease_ttl_s=600,  # the producers send no heartbeats
)


class HalfMarks:
    """Gives every response the same reward."""

    async def score(
        self,
        name: str,
        data_source: str,
        responses: list[str],
        ground_truth: Any,
        extra_info: dict[str, Any],
        sample_infos: Any = (),
    ) -> list[SampleScore]:
        return [SampleScore(0.5, {}) for _ in responses]


def with_nan(model: Path, folder: Path) -> Path:
    """A copy of a model folder in which one weight is not a number."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def producer_of(queue: RedisReplayQueue, name: str, engine: Engine, model: Path) -> Producer:
    tokenization, metrics = Tokenization(model), RolloutMetrics(CollectorRegistry())
    agents = Agents.load(AgentsConfig(), 64, tokenization)
    maker = GroupMaker("test", name, engine, tokenization, HalfMarks(), metrics, agents)
    rollout = RolloutConfig(max_concurrent_groups=4)
    return Producer(queue, name, maker, rollout, REPLAY, metrics, may_lease=lambda: True)


def staged(publisher: WeightPublisher, model: Path) -> None:
    weights = list(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    version = publisher.begin(1, 1, [(name, tuple(weight.shape)) for name, weight in weights])
    for name, weight in weights:
        version.put(name, weight.detach())


async def trained(queue: RedisReplayQueue) -> Sequence[int]:
    """Take and commit every group. All of them are from the good version."""
    taken: list[int] = []
    while len(taken) < NUM_PROMPTS:
        ids = await queue.take(1, NUM_PROMPTS)
        for delivery in await queue.fetch(ids):
            assert decode_group(delivery.payload).min_version == 1
        taken += ids
        await queue.wait_for_groups(0.2)
    await queue.commit(1, taken)
    return taken


async def test_bad_weights_pause_every_server_and_good_ones_train_every_prompt(
    tmp_path: Path, queue: RedisReplayQueue
) -> None:
    good = make_tiny_qwen2(tmp_path / "good", seed=1)
    bad = with_nan(good, tmp_path / "bad")
    queue.config = REPLAY
    prompt = Prompt(token_ids=(5, 6, 7), sampling=Sampling(max_tokens=4), num_samples=2)
    await queue.submit([encode_prompt(prompt)] * NUM_PROMPTS, [0] * NUM_PROMPTS, "")
    await queue.take_term(0)
    control = RunControl(queue.client, "test")
    config = config_of(tmp_path, bad, None, "shm")
    weights = config.weights.model_copy(update={"ready_timeout_s": 100.0, "push_timeout_s": 100.0})
    config = config.model_copy(update={"weights": weights})
    async with asyncio.timeout(250), AsyncExitStack() as stack:
        members = [await stack.enter_async_context(member(config)) for _ in range(2)]
        producers = [producer_of(queue, target.server_id, engine, bad) for target, engine, _ in members]
        loops = [asyncio.create_task(producer.lease_loop()) for producer in producers]
        try:
            while len(await control.open_breakers()) < 2 or any(producer.num_running for producer in producers):
                await asyncio.sleep(0.02)
            assert {breaker.reason for breaker in await control.open_breakers()} == {"non_finite"}
            stat = await queue.stat()
            assert (stat.dead_lettered, stat.pending_prompts, stat.inserted) == (0, NUM_PROMPTS, 0)

            publisher = WeightPublisher(config, HOST)
            staged(publisher, good)
            report = await asyncio.to_thread(publisher.push, 1, [target for target, _, _ in members])
            assert not report.failed, report
            await queue.publish(1, 0, b"")
            assert len(set(await trained(queue))) == NUM_PROMPTS
        finally:
            for loop in loops:
                await end_task(loop)
    stat = await queue.stat()
    assert (stat.trained, stat.dead_lettered, stat.conservation_error) == (NUM_PROMPTS, 0, 0)
    assert await control.open_breakers() == []
