"""Measures the cost of metrics: the two halves of the demo's work run with metrics on and off, in turn, in one process.

    make bench-metrics

`rollout` makes groups from the demo's prompts with the torch engine and the demo's model: lease, generate, score,
encode, append. `learner` takes optimizer steps with the demo's model on a batch of these groups, which is as large as
in the demo. With metrics on, the process records all its metrics and is scraped as often as in deploy/prometheus. With
metrics off, it does neither. Rates are per CPU time of the process, because the demo is limited by CPU time.

Two windows of the same work differ by more than the cost of metrics. So many short windows alternate, and the printed
interval of the median ratio must be narrower than the bar. The benchmark also prints the share of CPU time that calls
on metrics and scrapes take.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from prometheus_client import CollectorRegistry, generate_latest

from harness import Bar, Measurement, alternate, ratios, report, sized
from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.algorithms import CorrectionConfig
from penstock.config.rollout import AgentsConfig, EngineConfig, RewardConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.feed.datasets import read_prompts
from penstock.trajectory import Group, Sampling
from penstock_learner.algorithms import corrections
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.metrics import PHASES, LearnerMetrics
from penstock_learner.model.backbone import ModelInputs
from penstock_learner.model.causal_lm import load_model
from penstock_learner.steps.step_result import batch_metrics, mean_rewards
from penstock_rollout.agents.registry import Agents
from penstock_rollout.engines.factory import create_engine, start_engine
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"
REPLAY = ReplayConfig(groups_per_step=10**6, max_staleness=10**6, capacity_bytes=2**40)
MAX_MODEL_LEN = 64
BATCH_GROUPS = 32
"""Number of groups that a step of the demo trains."""
GROUPS_PER_ROUND = 4
NUM_ROUNDS = {"rollout": sized(1501, 1), "learner": sized(401, 1), "share": sized(31, 1)}
SCRAPE_S = 5.0
"""Interval between scrapes. Only the time with metrics on counts, which is half of the time."""
GOAL = 0.99


class NoMetrics:
    """Accepts every call on a metric and does nothing."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class TimedMetrics:
    """Passes every call on, and adds up the CPU time of the calls, including the time for reading the clock."""

    def __init__(self, target: Any, spent_s: list[float]) -> None:
        self._target = target
        self._spent_s = spent_s

    def __getattr__(self, name: str) -> TimedMetrics:
        return TimedMetrics(getattr(self._target, name), self._spent_s)

    def __call__(self, *arguments: object, **named: object) -> TimedMetrics:
        return self._timed(self._target, *arguments, **named)

    def __enter__(self) -> TimedMetrics:
        return self._timed(self._target.__enter__)

    def __exit__(self, *raised: object) -> None:
        self._timed(self._target.__exit__, *raised)

    def _timed(self, call: Callable[..., Any], *arguments: object, **named: object) -> TimedMetrics:
        started = time.thread_time()
        answer = call(*arguments, **named)
        self._spent_s[0] += time.thread_time() - started
        return TimedMetrics(answer, self._spent_s)


def scrape_share(registry: CollectorRegistry) -> float:
    """The share of CPU time that one scrape every SCRAPE_S takes."""
    started = time.thread_time()
    generate_latest(registry)
    return (time.thread_time() - started) / SCRAPE_S


class RolloutHalf:
    """The half that makes groups. `run` measures one round."""

    def __init__(self) -> None:
        self.metrics = RolloutMetrics(CollectorRegistry())
        config = EngineConfig(name="torch", max_model_len=MAX_MODEL_LEN, max_num_seqs=64)
        self.engine = create_engine(config, EXAMPLE / "model", "float32", 1)
        self.scorer = Scorer(RewardConfig(function_file=EXAMPLE / "reward.py"), self.metrics)
        tokenization = Tokenization(EXAMPLE / "model")
        agents = Agents.load(AgentsConfig(), MAX_MODEL_LEN, tokenization)
        self.queue = MemoryReplayQueue(MemoryStore(), REPLAY)
        self.maker = GroupMaker("bench", "r", self.engine, tokenization, self.scorer, self.metrics, agents)
        self.producer = Producer(
            self.queue, "r", self.maker, RolloutConfig(max_concurrent_groups=4), REPLAY, self.metrics,
            may_lease=lambda: True, engine_stats=self.engine.stats,
        )  # fmt: skip
        prompts = read_prompts(EXAMPLE / "train.parquet", num_samples=8, sampling=Sampling(max_tokens=8, seed=1))
        self.payloads = [encode_prompt(prompt) for prompt in itertools.islice(prompts, GROUPS_PER_ROUND)]
        """The prompts of every round. They have the same seeds in every round, so only the metrics differ."""
        self.groups: list[Group] = []
        self.scraped_at = 0.0

    async def start(self) -> None:
        await self.scorer.check()
        await start_engine(self.engine, 60)
        await self.queue.take_term(0)

    async def stop(self) -> None:
        await self.engine.stop()
        await self.scorer.close()

    async def run(self, metrics: Any) -> float:
        """Groups per CPU second."""
        for part in (self.scorer, self.maker, self.producer):
            part.metrics = metrics
        await self.queue.submit(self.payloads, [0] * GROUPS_PER_ROUND, "")
        cpu_started = time.process_time()
        leasing = asyncio.create_task(self.producer.lease_loop())
        while (stat := await self.queue.stat()).queued < GROUPS_PER_ROUND:
            await asyncio.sleep(0.005)
            if metrics is self.metrics and time.monotonic() - self.scraped_at > SCRAPE_S / 2:
                generate_latest(self.metrics.registry)
                self.scraped_at = time.monotonic()
        await end_task(leasing)
        rate = GROUPS_PER_ROUND / (time.process_time() - cpu_started)
        ids = await self.queue.take(stat.step + 1, GROUPS_PER_ROUND)
        self.groups = [decode_group(delivery.payload) for delivery in await self.queue.fetch(ids)]
        await self.queue.commit(stat.step + 1, ids)
        return rate

    async def share(self) -> float:
        """The share of CPU time that metrics take, with one scrape per SCRAPE_S of work."""
        spent_s = [0.0]
        rate = await self.run(TimedMetrics(self.metrics, spent_s))
        return spent_s[0] * rate / GROUPS_PER_ROUND + scrape_share(self.metrics.registry)


class LearnerHalf:
    """The half that trains. `run` measures one step."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = list(itertools.islice(itertools.cycle(groups), BATCH_GROUPS))
        self.rewards = batch_of(self.groups).rewards
        self.metrics = LearnerMetrics(CollectorRegistry(), "standalone")
        self.model = load_model(EXAMPLE / "model", torch.float32, 2048)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.count_ratios = corrections._count_ratios
        self.scraped_at = 0.0

    def run(self, is_on: bool) -> float:
        """Steps per CPU second."""
        corrections._count_ratios = self.count_ratios if is_on else lambda ratio, mask: ratio
        started = time.process_time()
        self.step(is_on)
        if is_on and time.monotonic() - self.scraped_at > SCRAPE_S / 2:
            generate_latest(self.metrics.registry)
            self.scraped_at = time.monotonic()
        return 1 / (time.process_time() - started)

    def share(self) -> float:
        """The share of a step's CPU time that metrics take."""
        spent_s = [0.0]
        corrections._count_ratios = lambda *a: TimedMetrics(self.count_ratios, spent_s)(*a)._target
        record = self.record
        self.record = TimedMetrics(record, spent_s)  # type: ignore[assignment,method-assign]
        started = time.process_time()
        self.step(is_on=True)
        self.record = record  # type: ignore[method-assign]
        return spent_s[0] / (time.process_time() - started) + scrape_share(self.metrics.registry)

    def step(self, is_on: bool) -> None:
        batch = batch_of(self.groups)
        metrics = batch_metrics(batch, 0)
        log_probs, _ = self.model(ModelInputs.of(batch, torch.device("cpu")))
        behaviour, mask = torch.as_tensor(batch.behaviour_log_probs), torch.as_tensor(batch.loss_mask)
        ids = torch.as_tensor(batch.sequence_ids)
        correction = corrections.correct(log_probs.detach(), behaviour, mask, ids, CorrectionConfig())
        self.optimizer.zero_grad(set_to_none=True)
        (-(log_probs * correction.weights).mean()).backward()
        self.optimizer.step()
        if is_on:
            self.record(metrics, correction.statistics)

    def record(self, metrics: dict[str, float], statistics: corrections.CorrectionStatistics) -> None:
        names = (
            "step_s",
            "compute_s",
            "overhead_ratio",
            "idle_ratio",
            "loss",
            "kl_loss",
            "kl_reference",
            "clip_ratio_low",
            "clip_ratio_high",
            "skipped",
            "entropy",
        )
        metrics |= dict.fromkeys((*names, *(f"{phase}_s" for phase in PHASES)), 0.1)
        metrics |= {"kl_behaviour": statistics.mean_kl, "effective_sample_ratio": statistics.effective_sample_ratio}
        self.metrics.record_step(metrics, mean_rewards(self.groups, self.rewards))
        self.metrics.importance_ratio.add(statistics.ratio_counts.tolist(), float(statistics.sum_ratio))
        self.metrics.staleness.observe_all([group.min_version for group in self.groups])


def in_turn(
    half: str, unit: str, on: Callable[[], float], off: Callable[[], float], share: Callable[[], float]
) -> tuple[list[Measurement], list[Bar]]:
    contenders = {f"{half}: metrics off": off, f"{half}: metrics on": on}
    off_rates, on_rates = alternate(contenders, NUM_ROUNDS[half], unit).values()
    name = f"{half}: share of metrics"
    shares = alternate({name: share}, NUM_ROUNDS["share"], "of the CPU time")[name]
    ratio = ratios(f"{half}: on / off", on_rates, off_rates)
    print(
        f"{half}: on / off {ratio.median:.4f}, 95 % in {ratio.interval[0]:.4f} to {ratio.interval[1]:.4f}", flush=True
    )
    bars = [
        Bar(f"{half}: metrics on / off", ratio.median, GOAL),
        Bar(f"{half}: share of the CPU time", shares.median, 1 - GOAL, at_most=True),
    ]
    return [off_rates, on_rates, ratio, shares], bars


def main() -> int:
    torch.set_num_threads(1)
    with asyncio.Runner() as runner:
        rollout = RolloutHalf()
        runner.run(rollout.start())
        try:
            measured, bars = in_turn(
                "rollout", "groups/CPU s",
                lambda: runner.run(rollout.run(rollout.metrics)), lambda: runner.run(rollout.run(NoMetrics())),
                lambda: runner.run(rollout.share()),
            )  # fmt: skip
        finally:
            runner.run(rollout.stop())
    learner = LearnerHalf(rollout.groups)
    more, other = in_turn(
        "learner", "steps/CPU s", lambda: learner.run(True), lambda: learner.run(False), learner.share
    )
    is_met = report("metrics", "the demo's work with and without metrics", measured + more, bars + other)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
