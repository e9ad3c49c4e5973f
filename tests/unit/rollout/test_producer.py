"""The producer keeps every accepted group in its outbox, whatever happens while the group is appended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.learner import RewardModelConfig
from penstock.config.rollout import RolloutConfig
from penstock.config.service import BreakerConfig, ReplayConfig
from penstock.errors import PenstockError, PoisonGroup
from penstock.replay.queue_types import AppendOutcome, FinishedGroup, Lease
from penstock.trajectory import Group, Prompt, Sampling
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from support.groups import make_group
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore


class SlowAnswers(MemoryReplayQueue):
    """Accepts groups at once, but returns once `answer` is set. Sets `lost` when a heartbeat finds a lease gone."""

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(MemoryStore(), config)
        self.answer = asyncio.Event()
        self.lost = asyncio.Event()

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        outcomes = await super().append_many(groups)
        await self.answer.wait()
        return outcomes

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        lost = await super().heartbeat(server_id, leases)
        if lost:
            self.lost.set()
        return lost


class Maker:
    async def make(self, lease: Lease, prompt: Prompt, *_: object) -> Group:
        return make_group(lease.prompt_id)


async def test_a_heartbeat_does_not_cut_off_a_group_that_was_just_accepted() -> None:
    replay = ReplayConfig(lease_ttl_s=0.3)
    queue = SlowAnswers(ReplayConfig())  # heartbeats are frequent, and yet no lease expires
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)], [0], "")
    maker: Any = Maker()
    metrics = RolloutMetrics(CollectorRegistry())
    producer = Producer(queue, "server", maker, RolloutConfig(), replay, metrics, may_lease=lambda: True)
    loops = [asyncio.create_task(producer.lease_loop()), asyncio.create_task(producer.heartbeat_loop())]
    try:
        async with asyncio.timeout(60):
            await queue.lost.wait()
            queue.answer.set()
            while producer.num_running:
                await asyncio.sleep(0.01)
    finally:
        for loop in loops:
            await end_task(loop)
    assert list(producer._outbox) == [1]


class LateAppends(MemoryReplayQueue):
    """Takes no group before `open` is set. Sets `asked` when the first one comes."""

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(MemoryStore(), config)
        self.open, self.asked = asyncio.Event(), asyncio.Event()

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        self.asked.set()
        await self.open.wait()
        return await super().append_many(groups)


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_server_that_ends_appends_its_finished_groups_first(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_rollout.groups.producer.LAST_APPEND_S", 60.0 if arrives else 0.05)
    replay = ReplayConfig()
    queue = LateAppends(replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)], [0], "")
    maker: Any = Maker()
    metrics = RolloutMetrics(CollectorRegistry())
    producer = Producer(queue, "server", maker, RolloutConfig(), replay, metrics, may_lease=lambda: True)
    leasing = asyncio.create_task(producer.lease_loop())
    async with asyncio.timeout(60):
        await queue.asked.wait()
        await end_task(leasing)
        if arrives:
            asyncio.get_running_loop().call_later(0.05, queue.open.set)
        await producer.drain()
    assert (await queue.stat()).queued == int(arrives)
    leased = await queue.lease("other", 1)
    assert len(leased) == int(not arrives), "a prompt whose group does not arrive is given back"
    assert (await queue.stat()).conservation_error == 0


class LateLeases(MemoryReplayQueue):
    """Leases at once, but returns once `answer` is set. Sets `leased` in between."""

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(MemoryStore(), config)
        self.leased, self.answer = asyncio.Event(), asyncio.Event()

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        leases = await super().lease(server_id, max_prompts)
        self.leased.set()
        await self.answer.wait()
        return leases


async def test_a_server_that_ends_gives_back_prompts_whose_lease_was_on_its_way() -> None:
    replay = ReplayConfig()
    queue = LateLeases(replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)], [0], "")
    maker: Any = Maker()
    metrics = RolloutMetrics(CollectorRegistry())
    producer = Producer(queue, "server", maker, RolloutConfig(), replay, metrics, may_lease=lambda: True)
    leasing = asyncio.create_task(producer.lease_loop())
    async with asyncio.timeout(60):
        await queue.leased.wait()
        await end_task(leasing)
        asyncio.get_running_loop().call_later(0.05, queue.answer.set)
        await producer.drain()
    assert len(await queue.lease("other", 1)) == 1
    stat = await queue.stat()
    assert (stat.reclaimed, stat.conservation_error) == (0, 0)


class RefusedLeases(LateLeases):
    """Answers the first lease. The second is refused as a command that Redis does not take."""

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        if self.leased.is_set():
            raise PenstockError("Redis refused a command")
        self.answer.set()
        return await super().lease(server_id, max_prompts)


async def test_a_server_whose_lease_was_refused_gives_back_what_it_has() -> None:
    replay = ReplayConfig()
    queue = RefusedLeases(replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)], [0], "")
    maker: Any = SimpleNamespace(make=lambda *_: asyncio.Event().wait())
    metrics, config = RolloutMetrics(CollectorRegistry()), RolloutConfig()
    producer = Producer(queue, "server", maker, config, replay, metrics, may_lease=lambda: True)
    async with asyncio.timeout(60):
        with pytest.raises(PenstockError, match="refused"):
            await producer.lease_loop()
        await producer.drain()
    assert len(await MemoryReplayQueue.lease(queue, "other", 1)) == 1


async def test_a_freed_place_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease loop must wait for the freed place, since the periodic check never comes here."""
    monkeypatch.setattr("penstock_rollout.groups.producer.FULL_POLL_S", 3600.0)
    replay = ReplayConfig(groups_per_step=100)
    queue = MemoryReplayQueue(MemoryStore(), replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)] * 30, [0] * 30, "")
    maker: Any = Maker()
    metrics = RolloutMetrics(CollectorRegistry())
    config = RolloutConfig(max_concurrent_groups=1)
    producer = Producer(queue, "server", maker, config, replay, metrics, may_lease=lambda: True)
    leasing = asyncio.create_task(producer.lease_loop())
    try:
        async with asyncio.timeout(60):
            while len(producer._outbox) < 30:
                await asyncio.sleep(0.01)
    finally:
        await end_task(leasing)


class BadWeights:
    """Fails every prompt as NaN weights do, until `are_good`."""

    are_good = False

    async def make(self, lease: Lease, prompt: Prompt, *_: object) -> Group:
        await asyncio.sleep(0)
        if not self.are_good:
            raise PoisonGroup("non_finite", "trajectory 0: a log-prob or the reward is not finite")
        return make_group(lease.prompt_id)


async def test_bad_weights_pause_leasing_and_bury_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    replay = ReplayConfig(groups_per_step=100, max_attempts=2, breaker=BreakerConfig(probe_s=0.01))
    queue = MemoryReplayQueue(MemoryStore(), replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)] * 30, [0] * 30, "")
    maker: Any = BadWeights()
    metrics = RolloutMetrics(CollectorRegistry())
    config = RolloutConfig(max_concurrent_groups=8)
    producer = Producer(queue, "server", maker, config, replay, metrics, may_lease=lambda: True)
    leasing = asyncio.create_task(producer.lease_loop())
    try:
        async with asyncio.timeout(60):
            while queue.store.open_breaker("server") is None:
                await asyncio.sleep(0.01)
            maker.are_good = True
            while len(producer._outbox) < 30:
                await asyncio.sleep(0.01)
    finally:
        await end_task(leasing)
    assert queue.store.dead == [] and queue.store.breakers == {}
    [pause] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "leasing pauses" in pause.message and "non_finite" in pause.message and "\n" not in pause.message


@pytest.mark.parametrize("validation_samples", [0, 4])
async def test_groups_of_validations_are_kept_for_the_reward_model_and_for_their_text(validation_samples: int) -> None:
    replay = ReplayConfig()
    queue = MemoryReplayQueue(MemoryStore(), replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=4)
    for name in ("validation-math-5", "once"):
        prompts = [replace(prompt, evaluation_id=name, data_source=source) for source in ("rules", "chat", "rules")]
        await queue.create_evaluation(name, [encode_prompt(each) for each in prompts])
    maker: Any = Maker()
    producer = Producer(
        queue, "server", maker, RolloutConfig(), replay, RolloutMetrics(CollectorRegistry()), may_lease=lambda: True,
        reward_model=RewardModelConfig(path=Path("rm"), data_sources=("chat*",)), validation_samples=validation_samples,
    )  # fmt: skip
    leasing = asyncio.create_task(producer.lease_loop())
    async with asyncio.timeout(60):
        while any([(await queue.get_evaluation(name)).num_finished < 3 for name in ("validation-math-5", "once")]):
            await asyncio.sleep(0.01)
        await end_task(leasing)
    *of_text, prompt_id = (await queue.kept_groups("validation-math-5")).prompt_ids
    assert (of_text, prompt_id) == ([1] if validation_samples else [], 2), "of those not scored, the first four samples"
    [payload] = await queue.fetch_kept("validation-math-5", [prompt_id])
    assert decode_group(payload).prompt_id == prompt_id
    assert (await queue.kept_groups("once")).prompt_ids == (), "the learner does not see its scores"


async def test_validations_record_the_accuracy_that_rewards_say() -> None:
    class Accurate(Maker):
        async def make(self, *arguments: Any, **keywords: Any) -> Group:
            group = await super().make(*arguments, **keywords)
            samples = [
                replace(t, reward_parts={"acc": float(place == 0)}) for place, t in enumerate(group.trajectories)
            ]
            return replace(group, trajectories=tuple(samples))

    replay = ReplayConfig()
    queue = MemoryReplayQueue(MemoryStore(), replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=4)
    held_out = replace(prompt, evaluation_id="validation-math-1", data_source="aime")
    await queue.create_evaluation("validation-math-1", [encode_prompt(held_out)])
    maker: Any = Accurate()
    metrics = RolloutMetrics(CollectorRegistry())
    producer = Producer(queue, "server", maker, RolloutConfig(), replay, metrics, may_lease=lambda: True)
    leasing = asyncio.create_task(producer.lease_loop())
    async with asyncio.timeout(60):
        while (await queue.get_evaluation("validation-math-1")).num_finished < 1:
            await asyncio.sleep(0.01)
        await end_task(leasing)
    assert (await queue.get_evaluation("validation-math-1")).by_source["aime"]["acc/mean@4"] == 0.25
