"""The producer keeps every accepted group in its outbox, whatever happens while the group is appended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from groups import make_group
from penstock.cancellation import end_task
from penstock.codec import encode_prompt
from penstock.config.rollout import RolloutConfig
from penstock.config.service import BreakerConfig, ReplayConfig
from penstock.errors import PoisonGroup
from penstock.replay.contract import AppendOutcome, FinishedGroup, Lease
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock.replay.memory_store import MemoryStore
from penstock.trajectory import Group, Prompt, Sampling
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics


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
    async def make(self, lease: Lease, prompt: Prompt) -> Group:
        return make_group(lease.prompt_id)


async def test_a_heartbeat_does_not_cut_off_a_group_that_was_just_accepted() -> None:
    replay = ReplayConfig(lease_ttl_s=0.3)
    queue = SlowAnswers(replay)
    prompt = Prompt(messages=(("user", "1+1"),), sampling=Sampling(), num_samples=1)
    await queue.submit([encode_prompt(prompt)], [0], "")
    maker: Any = Maker()
    metrics = RolloutMetrics(CollectorRegistry())
    producer = Producer(queue, "server", maker, RolloutConfig(), replay, metrics, may_lease=lambda: True)
    loops = [asyncio.create_task(producer.lease_loop()), asyncio.create_task(producer.heartbeat_loop())]
    try:
        async with asyncio.timeout(20):
            await queue.lost.wait()
            queue.answer.set()
            while producer.num_running:
                await asyncio.sleep(0.01)
    finally:
        for loop in loops:
            await end_task(loop)
    assert list(producer._outbox) == [1]


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
        async with asyncio.timeout(20):
            while len(producer._outbox) < 30:
                await asyncio.sleep(0.01)
    finally:
        await end_task(leasing)


class BadWeights:
    """Fails every prompt as NaN weights do, until `are_good`."""

    are_good = False

    async def make(self, lease: Lease, prompt: Prompt) -> Group:
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
        async with asyncio.timeout(20):
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
