"""The cost of saving tokens while nothing fails: CPU time per token of a rollout server with the torch engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from harness import Bar, Measurement, median_ratio
from penstock.cancellation import end_task
from penstock.codec import encode_prompt
from penstock.config.rollout import AdaptiveConcurrencyConfig, AgentsConfig, EngineConfig, RewardConfig, RolloutConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.agents.registry import Agents
from penstock_rollout.agents.saved_samples import TokenSaver
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from replay import Server
from rollout_parts.model import ModelShape, make_model

SHAPE = ModelShape(
    vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2,
    max_positions=2048,
)  # fmt: skip
NUM_ROUNDS, NUM_GROUPS, NUM_SAMPLES, NUM_TOKENS = 10, 4, 8, 512
TIMEOUT_S = 300.0


class CostRounds:
    """One engine, and a server per contender that uses it in turn."""

    def __init__(self, redis: Server, engine: TorchEngine, folder: Path) -> None:
        self.client = connect(RedisConfig(url=redis.url))
        self.engine = engine
        self.folder = folder
        self.num_runs = 0

    async def round(self, every_tokens: int) -> tuple[float, float]:
        """Make some groups. Returns CPU time of this process per token, in µs, and tokens per second."""
        self.num_runs += 1
        replay = ReplayConfig(groups_per_step=10**6, max_staleness=10**6)
        queue = RedisReplayQueue(self.client, f"cost-{self.num_runs}", replay)
        metrics, tokenization = RolloutMetrics(CollectorRegistry()), Tokenization(self.folder)
        engine: Any = self.engine
        saver = TokenSaver(queue, engine, "server", metrics, every_tokens, replay.max_staleness)
        scorer = Scorer(RewardConfig(), metrics)
        agents = Agents.load(AgentsConfig(), SHAPE.max_positions, tokenization)
        maker = GroupMaker("cost", "server", engine, tokenization, scorer, metrics, agents, saver=saver)
        rollout = RolloutConfig(adaptive_concurrency=AdaptiveConcurrencyConfig(enabled=False))
        producer = Producer(queue, "server", maker, rollout, replay, metrics, may_lease=lambda: True, saver=saver)
        loops = [
            asyncio.create_task(loop) for loop in (producer.lease_loop(), producer.heartbeat_loop(), saver.save_loop())
        ]
        sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
        prompt = Prompt(token_ids=(5, 6, 7), sampling=sampling, num_samples=NUM_SAMPLES)
        started, cpu_started = time.monotonic(), time.process_time()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await queue.submit([encode_prompt(prompt)] * NUM_GROUPS, [0] * NUM_GROUPS, "")
                while (await queue.stat()).queued < NUM_GROUPS:
                    await queue.wait_for_groups(0.5)
        finally:
            for loop in loops:
                await end_task(loop)
            await scorer.close()
        num_tokens = NUM_GROUPS * NUM_SAMPLES * NUM_TOKENS
        return 1e6 * (time.process_time() - cpu_started) / num_tokens, num_tokens / (time.monotonic() - started)


async def measure_cost(redis: Server, folder: Path, every_tokens: int) -> tuple[list[Measurement], list[Bar]]:
    model = make_model(folder / "cost-model", SHAPE, mean_tokens=64)
    config = EngineConfig(max_model_len=SHAPE.max_positions, max_num_seqs=NUM_GROUPS * NUM_SAMPLES)
    engine = TorchEngine(config, model, "float32", 0)
    await engine.start(0)
    rounds = CostRounds(redis, engine, model)
    contenders = {"saving": every_tokens, "not saving": 0}
    cpu = {name: Measurement(f"CPU of a server, {name}", "µs/token") for name in contenders}
    rates = {name: Measurement(f"torch engine, {name}", "tokens/s") for name in contenders}
    try:
        for number in range(NUM_ROUNDS + 1):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                cpu_us, rate = await rounds.round(contenders[name])
                print(f"round {number}, {name}: {cpu_us:.0f} µs of CPU per token, {rate:.0f} tokens/s", flush=True)
                if number:
                    cpu[name].rates.append(cpu_us)
                    rates[name].rates.append(rate)
    finally:
        await engine.stop()
        await rounds.client.aclose()
    more = median_ratio(cpu["saving"], cpu["not saving"]) - 1
    goal = Bar("further CPU time of a server that saves its tokens", more, 0.02, at_most=True)
    return [*cpu.values(), *rates.values()], [goal]
