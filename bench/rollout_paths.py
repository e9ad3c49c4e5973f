"""The two ways to the same engine: the data path of a rollout server, and vLLM's own `generate`.

Both ask for the same prompts with the same sampling parameters and keep the same number of requests before the engine,
more than it decodes at once, so that it is never short of work. Both run in the process that holds AsyncLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from prometheus_client import CollectorRegistry

from harness import Measurement
from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.agents import AgentsConfig
from penstock.config.rollout import EngineConfig, RewardConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock.replay.memory_store import MemoryStore
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.agents.registry import Agents
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.vllm_engine import VllmEngine
from penstock_rollout.group_maker import GroupMaker
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.producer import Producer
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization

Queue = Any
"""MemoryReplayQueue, or RedisReplayQueue."""

MAX_MODEL_LEN = 1024
POLL_S = 0.02
REPLAY = ReplayConfig(groups_per_step=10**6, max_staleness=10**6, capacity_bytes=2**40)


@dataclass(frozen=True)
class Load:
    num_groups: int
    """Of one round."""
    samples_per_group: int
    prompt_tokens: int
    max_tokens: int
    concurrency: int
    """Requests that the engine decodes at once."""
    groups_at_once: int
    """Groups that the server works on; the bare path has as many requests in flight."""

    def prompts(self, vocab_size: int, seed: int) -> list[Prompt]:
        random = np.random.default_rng(seed)
        ids = random.integers(2, vocab_size, (self.num_groups, self.prompt_tokens)).tolist()
        sampling = Sampling(max_tokens=self.max_tokens)
        return [Prompt(token_ids=tuple(i), sampling=sampling, num_samples=self.samples_per_group) for i in ids]


class Paths:
    """One started engine, and both ways to it. The server lives through all rounds, as one does, and leases in its own
    only; what it handed in is taken and committed after each, as by a learner."""

    def __init__(self, engine: VllmEngine, queue: Queue, folder: Path, load: Load, vocab_size: int) -> None:
        self.engine = engine
        self.queue = queue
        self.load = load
        self.vocab_size = vocab_size
        metrics, tokenization = RolloutMetrics(CollectorRegistry()), Tokenization(folder)
        self.scorer = Scorer(RewardConfig(), metrics)
        agents = Agents.load(AgentsConfig(), MAX_MODEL_LEN, tokenization)
        maker = GroupMaker("bench", "rollout-0", engine, tokenization, self.scorer, metrics, agents)
        self.producer = Producer(
            queue, "rollout-0", maker, RolloutConfig(max_concurrent_groups=load.groups_at_once), REPLAY, metrics,
            may_lease=lambda: self._serving, engine_stats=engine.stats,
        )  # fmt: skip
        self._serving = False
        self._loops: list[asyncio.Task[None]] = []
        self._step = 0
        self._seeds = itertools.count()

    async def __aenter__(self) -> Self:
        await self.queue.take_term(0)
        loops = (self.producer.lease_loop(), self.producer.heartbeat_loop(), self.producer.reconcile_loop())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *raised: object) -> None:
        for loop in self._loops:
            await end_task(loop)
        await self.producer.drain()
        self.scorer.close()

    async def rounds(
        self, num_rounds: int, say: Callable[[str], None], until: float
    ) -> tuple[Measurement, Measurement]:
        """Rates of the bare engine and of the server. A warm-up round is thrown away; each round goes the other way
        round; none begins that would end after `until` on the monotonic clock."""
        measured = Measurement("AsyncLLM.generate", "tokens/s"), Measurement("rollout server", "tokens/s")
        contenders = list(zip(measured, (self.bare, self.served), strict=True))
        longest_s = 0.0
        for number in range(num_rounds + 1):
            started = time.monotonic()
            if number > 1 and started + 1.2 * longest_s > until:
                break
            for measurement, run in contenders if number % 2 else reversed(contenders):
                rate = await run()
                say(f"round {number}: {measurement.name}: {rate:,.0f} tokens/s{'' if number else ' (warm-up)'}")
                if number:
                    measurement.rates.append(rate)
            longest_s = max(longest_s, time.monotonic() - started)
        return measured

    async def bare(self) -> float:
        """AsyncLLM.generate, as a script would drive it."""
        from vllm.inputs.engine import tokens_input

        llm = self.engine._llm
        requests = self._requests(self.load.prompts(self.vocab_size, next(self._seeds)))
        num_tokens = 0

        async def work() -> None:
            nonlocal num_tokens
            for request in requests:
                prompt = tokens_input(list(request.prompt_token_ids), cache_salt="bare")
                async for output in llm.generate(prompt, self.engine._params(request), request.request_id):
                    if output.finished:
                        num_tokens += len(output.outputs[0].token_ids)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.load.groups_at_once * self.load.samples_per_group):
                tasks.create_task(work())
        return num_tokens / (time.perf_counter() - started)

    async def served(self) -> float:
        """Lease, generate by the agent, score, encode, append: the loops of a rollout server."""
        prompts = [encode_prompt(prompt) for prompt in self.load.prompts(self.vocab_size, next(self._seeds))]
        submission = await self.queue.submit(prompts, [0] * len(prompts), "")
        handed_in = self.producer.metrics.produced.labels("default")._value
        goal = handed_in.get() + len(prompts)
        started = time.perf_counter()
        self._serving = True
        while handed_in.get() < goal:
            await asyncio.sleep(POLL_S)
            assert not any(loop.done() for loop in self._loops), "a loop of the server ended"
        seconds = time.perf_counter() - started
        self._serving = False
        groups = [decode_group(await self.queue.get_group(prompt_id)) for prompt_id in submission.prompt_ids]
        assert all(len(group.trajectories) == self.load.samples_per_group for group in groups)
        self._step += 1
        await self.queue.commit(self._step, await self.queue.take(self._step, len(groups)))
        return sum(group.num_response_tokens for group in groups) / seconds

    def _requests(self, prompts: list[Prompt]) -> Iterator[GenerateRequest]:
        for (row, prompt), sample in itertools.product(enumerate(prompts), range(self.load.samples_per_group)):
            yield GenerateRequest(f"bare-{next(self._seeds)}.{row}.{sample}", prompt.token_ids, prompt.sampling)


def memory_queue() -> MemoryReplayQueue:
    return MemoryReplayQueue(MemoryStore(), REPLAY)


def engine_config(load: Load, **more: Any) -> EngineConfig:
    return EngineConfig(name="vllm", max_model_len=MAX_MODEL_LEN, max_num_seqs=load.concurrency, **more)
