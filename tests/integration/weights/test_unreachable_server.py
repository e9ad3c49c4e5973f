"""A server that the learner cannot reach: publication goes on without it, and it catches up alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.redis_client import connect
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.engines.engine import Engine
from support.engine_member import HOST, config_of, member
from support.faults.proxy import FaultyProxy
from support.redis_server import RedisProcess
from support.tiny_models import make_tiny_qwen2

FOREVER_S = 3600.0
"""No deadline of a push may end the wait for the server: the test gives up long before."""


@dataclass
class OneRankPolicy:
    """Replaces the policy's actors by a publisher in this process. Each lane has a thread."""

    publisher: WeightPublisher
    weights: dict[str, torch.Tensor]
    lanes: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def call_all(self, method: str, version: int, term: int, keep: list[int]) -> list[float]:
        shapes = [(name, tuple(weight.shape)) for name, weight in self.weights.items()]
        staged = self.publisher.begin(version, term, shapes, keep=keep)
        for name, weight in self.weights.items():
            staged.put(name, weight)
        return [0.0]

    async def call_in_lane(self, lane: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method != "publisher.push":
            return None
        version, targets, transport, base_version, name = arguments
        async with self.lanes.setdefault(lane, asyncio.Lock()):
            return await asyncio.to_thread(
                self.publisher.push, version, targets, transport=transport, base_version=base_version, lane=name
            )


async def report(fleet: Fleet, target: PushTarget, engine: Engine, publication: PolicyPublication) -> None:
    """Report a server to the fleet and follow its state, as FleetMembership does."""
    record = ServerRecord(target.server_id, target.address, "torch", transports=target.transports)
    while True:
        state = (await fleet.report(replace(record, policy_version=engine.policy_version))).state
        if state in (None, "JOINING", "EVICTED"):
            await fleet.set_state(target.server_id, "STALE")
        elif state == "STALE" and engine.policy_version == (publication.current or 0):
            await fleet.set_state(target.server_id, "READY")
        elif state == "READY" and engine.policy_version < (publication.current or 0):
            await fleet.set_state(target.server_id, "STALE")  # it became READY while a push ran without it
        await asyncio.sleep(0.05)


@dataclass
class Scene:
    """A learner's publication and two servers: one is near, the other can be cut off by the proxy."""

    publication: PolicyPublication
    fleet: Fleet
    near: Engine
    far: Engine
    far_id: str
    proxy: FaultyProxy

    async def publish(self, version: int) -> None:
        await self.publication.publish(await self.publication.stage(version), version, {})
        async with self.publication._changed:
            await self.publication._changed.wait_for(lambda: self.publication.current == version)


@asynccontextmanager
async def scene(folder: Path, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Version 1 is served by both. The far server goes on reporting to Redis when it is cut off."""
    monkeypatch.setattr("penstock_learner.weights.publisher.SILENCE_MS", 1000)
    monkeypatch.setattr("penstock_learner.loop.publication.MAX_BACKOFF_S", 0.5)
    config = config_of(folder, make_tiny_qwen2(folder / "model", seed=1), None, "shm")
    weights = config.weights.model_copy(update={"ready_timeout_s": FOREVER_S, "push_timeout_s": FOREVER_S})
    config = config.model_copy(update={"weights": weights, "redis": RedisConfig(url=redis.url)})
    client = connect(config.redis)
    await client.flushdb()  # members know the first term of a run
    queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
    term = await queue.take_term(0)
    policy: Any = OneRankPolicy(WeightPublisher(config, HOST), dict(_weights(config.model.path)))
    metrics = LearnerMetrics(CollectorRegistry(), "standalone")
    publication = PolicyPublication(config, queue, fleet, policy, term, metrics)
    async with (
        asyncio.timeout(240),
        member(config) as (near, near_engine, _),
        member(config) as (cut_off, far_engine, _),
        FaultyProxy((HOST, int(cut_off.address.rpartition(":")[2]))) as proxy,
    ):
        far = replace(cut_off, address=f"{HOST}:{proxy.port}")
        loops = [
            asyncio.create_task(loop)
            for loop in (
                publication.publish_loop(), publication.catch_up_loop(),
                report(fleet, near, near_engine, publication), report(fleet, far, far_engine, publication),
            )
        ]  # fmt: skip
        found = Scene(publication, fleet, near_engine, far_engine, far.server_id, proxy)
        try:
            while len(await fleet.servers()) < 2:
                await asyncio.sleep(0.01)
            await found.publish(1)
            await _serves(far_engine, 1)
            yield found
        finally:
            for loop in loops:
                await end_task(loop)
            await client.aclose()


@pytest.mark.fault_row(
    "weights", "a server is cut off", how="its listener is frozen behind a proxy",
    must="versions are published without it at once; it catches up alone",
)  # fmt: skip
async def test_versions_are_published_without_a_server_that_is_cut_off(
    tmp_path: Path, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, redis_process, monkeypatch) as found:
        found.proxy.black_hole()
        for version in range(2, 22):
            await found.publish(version)
            await _serves(found.near, version)
        assert found.far.policy_version == 1
        found.proxy.heal()
        await _serves(found.far, 21)
        await found.publish(22)
        await _serves(found.near, 22)
        await _serves(found.far, 22)


async def test_a_server_that_has_caught_up_while_the_next_version_was_pushed_gets_that_one_too(
    tmp_path: Path, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next push begins after the version that was brought to the server was found to be the newest, and before
    the server takes part in pushes again."""
    async with scene(tmp_path, redis_process, monkeypatch) as found:
        found.proxy.black_hole()
        await found.publish(2)
        caught_up, may_go_on, set_states = asyncio.Event(), asyncio.Event(), found.fleet.set_states

        async def held(server_ids: Sequence[str], state: Any, term: int) -> None:
            if state == "READY" and list(server_ids) == [found.far_id] and not caught_up.is_set():
                caught_up.set()
                await may_go_on.wait()
            await set_states(server_ids, state, term)

        monkeypatch.setattr(found.fleet, "set_states", held)
        found.proxy.heal()
        await caught_up.wait()
        await found.publish(3)
        may_go_on.set()
        await _serves(found.far, 3)


async def _serves(engine: Engine, version: int) -> None:
    while engine.policy_version != version:
        await asyncio.sleep(0.01)


def _weights(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return ((name, weight.detach()) for name, weight in AutoModelForCausalLM.from_pretrained(model).named_parameters())
