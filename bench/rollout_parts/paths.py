"""The two paths to the same engine: the data path of a rollout server, and vLLM's own `generate`.

Both use the same prompts and sampling parameters, and keep the same number of requests in the engine. This is more than
the engine decodes at once, so it always has work. Both run in the process that holds AsyncLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from prometheus_client import CollectorRegistry

from harness import Measurement, median_ratio, turns
from penstock.cancellation import end_task
from penstock.codec import encode_prompt
from penstock.config.rollout import AdaptiveConcurrencyConfig, AgentsConfig, EngineConfig, RewardConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.trajectory import Prompt, Sampling
from penstock.weights.folder_tensors import stop_token_ids
from penstock_rollout.agents.loops import Agents
from penstock_rollout.engines.engine import EngineStats, GenerateRequest
from penstock_rollout.engines.vllm.engine import VllmEngine, sampling_params
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore
from support.tiny_models import EOS_TOKEN_ID, write_tokenizer


@dataclass(frozen=True)
class ModelShape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: str = "float32"
    max_positions: int = 1024


def make_model(folder: Path, shape: ModelShape, mean_tokens: int) -> Path:
    """Write a model folder with a tokenizer. At temperature 1 a response ends with probability 1 / mean_tokens at each
    token. The first entry of every embedding is the same, so the output row of the end token can use it as a bias."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=EOS_TOKEN_ID,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        model: Any = Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        model.model.embed_tokens.weight[:, 0] = 1.0
        ids = torch.randint(2, shape.vocab_size, (4, 16))
        hidden = model.model(ids).last_hidden_state[:, -1].float()
        others = (hidden @ model.lm_head.weight.float().T).logsumexp(-1)
        row = torch.zeros(shape.hidden_size)
        row[0] = (others.mean() - math.log(mean_tokens)) / hidden[:, 0].mean()
        model.lm_head.weight[EOS_TOKEN_ID] = row.to(model.lm_head.weight.dtype)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.vocab_size)
    return folder


Queue = Any
"""A MemoryReplayQueue or a RedisReplayQueue."""

MAX_MODEL_LEN = 1024
POLL_S = 0.005
PATIENT = AdaptiveConcurrencyConfig(max_queue_s=60)
"""All groups of a round start together, so more requests wait at its start than later. A server meets such a burst
once, when it starts, but here it comes in every round. With this setting the concurrency limit does not react to it."""
WAIT_TIMEOUT_S = 90.0
"""Deadline of each wait within a round."""
REPLAY = ReplayConfig(groups_per_step=10**6, max_staleness=10**6, capacity_bytes=2**40)


@dataclass(frozen=True)
class Load:
    samples_per_group: int
    prompt_tokens: int
    mean_tokens: int
    """Mean length of a response, set by the weights of the model."""
    concurrency: int
    """Requests that the engine decodes at once."""
    groups_at_once: int
    """Groups that the server works on. The bare path has as many requests in flight. The samples of a group end one by
    one, and their lengths vary so much that on average half of them have ended while the group still runs. So
    `concurrency` rows need more than twice `concurrency / samples_per_group` groups."""
    window_tokens: int
    """Tokens over which a rate is measured. The same number is generated first, so that requests of every age run."""

    @property
    def num_groups(self) -> int:
        """Enough prompts for a window, the tokens before it, and the groups in flight at its end."""
        return 3 * self.window_tokens // (self.samples_per_group * self.mean_tokens) + 2 * self.groups_at_once

    def prompts(self, vocab_size: int, seed: int) -> Iterator[Prompt]:
        random = np.random.default_rng(seed)
        sampling = Sampling(max_tokens=2 * self.mean_tokens)
        while True:
            ids = tuple(random.integers(2, vocab_size, self.prompt_tokens).tolist())
            yield Prompt(token_ids=ids, sampling=sampling, num_samples=self.samples_per_group)


@dataclass(frozen=True)
class Window:
    rate: float
    """Tokens per second."""
    cpu_us: float
    """CPU time of this process per token."""
    stats: EngineStats
    """The load at the end of the window. If nothing waits, the server may have left rows of the engine idle."""

    def __str__(self) -> str:
        running, waiting = self.stats.running_requests, self.stats.waiting_requests
        return f"{self.rate:,.0f} tokens/s, {self.cpu_us:.0f} µs of CPU per token, {running} running, {waiting} waiting"


@dataclass
class Contender:
    """A path to the engine and its measurements, one entry per round."""

    rates: Measurement
    cpu: Measurement
    """CPU time of this process. EngineCore and the rewards run in other processes."""

    @classmethod
    def of(cls, name: str) -> Contender:
        return cls(Measurement(name, "tokens/s"), Measurement(f"{name}: CPU of the front end", "µs/token"))


@dataclass
class Contenders:
    bare: Contender = field(default_factory=lambda: Contender.of("AsyncLLM.generate"))
    served: Contender = field(default_factory=lambda: Contender.of("rollout server"))

    @property
    def measurements(self) -> list[Measurement]:
        return [self.bare.rates, self.served.rates, self.bare.cpu, self.served.cpu]

    @property
    def ratio(self) -> float:
        return median_ratio(self.served.rates, self.bare.rates)


class Paths:
    """One started engine and both paths to it. The server runs through all rounds, but leases only in its own. After
    each of its rounds, its groups are taken and committed, as a learner would do."""

    def __init__(self, engine: VllmEngine, queue: Queue, folder: Path, load: Load, vocab_size: int) -> None:
        self.engine = engine
        self.queue = queue
        self.folder = folder
        self.load = load
        self.vocab_size = vocab_size
        metrics, tokenization = RolloutMetrics(CollectorRegistry()), Tokenization(folder)
        self.scorer = Scorer(RewardConfig(), metrics)
        agents = Agents.load(AgentsConfig(), MAX_MODEL_LEN, tokenization)
        maker = GroupMaker("bench", "rollout-0", engine, tokenization, self.scorer, metrics, agents)
        rollout = RolloutConfig(max_concurrent_groups=load.groups_at_once, adaptive_concurrency=PATIENT)
        self.producer = Producer(
            queue, "rollout-0", maker, rollout, REPLAY, metrics, may_lease=lambda: self._serving,
            engine_stats=engine.stats,
        )  # fmt: skip
        self._serving = False
        self._loops: list[asyncio.Task[None]] = []
        self._step = 0
        self._seeds = itertools.count()

    async def __aenter__(self) -> Self:
        await self.scorer.check()
        await self.queue.take_term(0)
        loops = (self.producer.lease_loop(), self.producer.heartbeat_loop(), self.producer.reconcile_loop())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *raised: object) -> None:
        for loop in self._loops:
            await end_task(loop)
        await self.producer.drain()
        await self.scorer.close()

    async def rounds(self, num_rounds: int, say: Callable[[str], None], until: float) -> Contenders:
        """Measure the bare engine and the server in turn, in reverse order in every other round. A warm-up round is
        discarded. No round begins that would end after `until` on the monotonic clock."""
        measured = Contenders()
        contenders = {"bare": (measured.bare, self.bare), "served": (measured.served, self.served)}
        started, longest_s, latest = time.monotonic(), 0.0, 0
        for name, number in turns(contenders, num_rounds):
            if number > latest:
                now = time.monotonic()
                longest_s, started, latest = max(longest_s, now - started), now, number
                if number > 1 and now + 1.2 * longest_s > until:
                    break
            contender, run = contenders[name]
            window = await run()
            say(f"round {number}: {contender.rates.name}: {window}{'' if number else ' (warm-up)'}")
            if number:
                contender.rates.rates.append(window.rate)
                contender.cpu.rates.append(window.cpu_us)
        return measured

    async def _window(self) -> Window:
        """The engine's output rate, by its own count, once it is full."""
        load, num_tokens = self.engine.load, self.load.window_tokens
        goal = load.num_generated_tokens + num_tokens
        await self._until(lambda: load.num_generated_tokens >= goal, "an engine that is full")
        counted, started, cpu_started = load.num_generated_tokens, time.perf_counter(), time.process_time()
        await self._until(lambda: load.num_generated_tokens >= counted + num_tokens, f"{num_tokens} tokens")
        num_counted, cpu_s = load.num_generated_tokens - counted, time.process_time() - cpu_started
        rate = num_counted / (time.perf_counter() - started)
        return Window(rate, 1e6 * cpu_s / num_counted, self._stats())

    def _stats(self) -> EngineStats:
        """Statistics that include requests which bypass the server."""
        waiting, running = self.engine.load.waiting_requests, len(self.engine._llm.output_processor.request_states)
        return EngineStats(running - waiting, waiting, self.engine.load.kv_cache_usage)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition():
            await asyncio.sleep(POLL_S)
            for loop in self._loops:
                if loop.done():
                    raise RuntimeError(f"a loop of the server ended while it waited for {what}") from loop.exception()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {WAIT_TIMEOUT_S:.0f} s for {what}: {await self._state()}")

    async def _state(self) -> str:
        """A description of the state, for the error of a wait that takes too long."""
        producer, stat = self.producer, await self.queue.stat()
        counted: dict[Any, Any] = producer.metrics.failures._metrics
        failures = {labels[0]: child._value.get() for labels, child in counted.items()}
        return (
            f"{self.engine.load.num_generated_tokens} tokens so far, {self._stats()}; groups: "
            f"{producer.num_running} running of {producer.concurrency.limit} allowed, {len(producer._appending)} "
            f"being appended, {stat.pending_prompts} pending, {stat.queued} queued, {stat.dead_lettered} dead; "
            f"given back: {failures}"
        )

    async def bare(self) -> Window:
        """Measure AsyncLLM.generate, called as a script would call it."""
        from vllm.inputs.engine import tokens_input

        llm = self.engine._llm
        stop_ids = list(stop_token_ids(self.folder))
        requests = self._requests(self.load.prompts(self.vocab_size, next(self._seeds)))

        async def work() -> None:
            for request in requests:
                prompt = tokens_input(list(request.prompt_token_ids), cache_salt="bare")
                async for _ in llm.generate(prompt, sampling_params(request, stop_ids), request.request_id):
                    pass

        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(work()) for _ in range(self.load.groups_at_once * self.load.samples_per_group)]
            measured = await self._window()
            for worker in workers:
                worker.cancel()
        await self._until_idle()
        return measured

    async def served(self) -> Window:
        """Measure the loops of a rollout server: lease, generate with the agent, score, encode, append."""
        prompts = self.load.prompts(self.vocab_size, next(self._seeds))
        payloads = [encode_prompt(prompt) for prompt in itertools.islice(prompts, self.load.num_groups)]
        await self.queue.submit(payloads, [0] * len(payloads), "")
        self._serving = True
        measured = await self._window()
        self._serving = False
        assert (await self.queue.stat()).pending_prompts, "the server was short of prompts"
        await self.producer.drain()
        await self._until_idle()
        await self._train()
        return measured

    async def _until_idle(self) -> None:
        """Wait until the engine is empty. Requests that still ran when a window ended were aborted."""
        states = self.engine._llm.output_processor.request_states
        await self._until(lambda: not states and not self.producer.num_running, "an engine that is empty")

    async def _train(self) -> None:
        """Take and commit the appended groups, and check that none is missing."""
        appended, self._step = (await self.queue.stat()).queued, self._step + 1
        assert appended, "no group was appended"
        prompt_ids = await self.queue.take(self._step, appended)
        assert len(prompt_ids) == appended, "a group is missing"
        await self.queue.commit(self._step, prompt_ids)

    def _requests(self, prompts: Iterator[Prompt]) -> Iterator[GenerateRequest]:
        for row, prompt in enumerate(prompts):
            for sample in range(self.load.samples_per_group):
                yield GenerateRequest(f"bare-{next(self._seeds)}.{row}.{sample}", prompt.token_ids, prompt.sampling)


def memory_queue() -> MemoryReplayQueue:
    return MemoryReplayQueue(MemoryStore(), REPLAY)


def engine_config(load: Load, **more: Any) -> EngineConfig:
    return EngineConfig(name="vllm", max_model_len=MAX_MODEL_LEN, max_num_seqs=load.concurrency, **more)
