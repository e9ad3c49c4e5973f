"""The learner's side of the control for bench/scale.py: a publisher without weights, and steps without training."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.config.run import RunConfig
from penstock.machine import freeze_loaded_objects
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import SERVING_STATES, Fleet, RunControl
from penstock.store.redis_client import connect
from penstock.v1 import weights_pb2
from penstock_learner.loop.batches import GATHER_S, WAIT_S
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.weights.publisher import MemberCalls
from penstock_learner.weights.senders import PushReport, PushTarget

START_TIMEOUT_S = 180.0


class NoWeights:
    """Stands in for the policy's ranks: makes the calls of a push, and sends no bytes."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.calls = MemberCalls(config)
        self.term = 0

    async def call_all(self, method: str, *arguments: Any) -> list[float]:
        """A rank that has computed for no time."""
        return [0.0]

    async def call_in_lane(
        self, lane: str, method: str, policy_version: int, targets: Sequence[PushTarget], *_: Any, timeout_s: float
    ) -> PushReport:
        return await asyncio.to_thread(self._push, policy_version, targets)

    def _push(self, policy_version: int, targets: Sequence[PushTarget]) -> PushReport:
        result = PushReport(policy_version, "gloo")
        deadline_s = self.config.weights.push_timeout_s
        manifest = weights_pb2.WeightManifest(run=self.config.run, policy_version=policy_version, term=self.term)
        requests = [
            weights_pb2.AnnounceRequest(
                manifest=manifest, transport="gloo", rendezvous="-", rank=rank, world_size=len(targets) + 1,
                deadline_s=deadline_s,
            )
            for rank, _ in enumerate(targets, 1)
        ]  # fmt: skip
        _, result.failed = self.calls.announce(targets, requests)
        request = weights_pb2.CommitRequest(policy_version=policy_version, term=self.term, deadline_s=deadline_s)
        ready = [target for target in targets if target.server_id not in result.failed]
        responses, failed = self.calls.commit(ready, request)
        result.committed, result.failed = sorted(responses), result.failed | failed
        return result


class Learner:
    """The calls of a learner to the queue and to the fleet."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.client = connect(config.redis)
        self.queue = RedisReplayQueue(self.client, config.run, config.replay)
        self.fleet = Fleet(self.client, config.run)
        self.control = RunControl(self.client, config.run)
        self.weights = NoWeights(config)
        self.publication: PolicyPublication
        self.step = 1

    async def start(self) -> None:
        self.weights.term = await self.queue.take_term(0)
        metrics = LearnerMetrics(CollectorRegistry(), "none")
        self.publication = PolicyPublication(
            self.config, self.queue, self.fleet, self.weights, self.weights.term, metrics  # type: ignore[arg-type]
        )  # fmt: skip
        self.publication.snapshots.last_step = 0  # there are no weights to write
        freeze_loaded_objects()  # as ranks and the controller do

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publish versions, and look out for servers that are behind, as a learner does all the time."""
        loops = (self.publication.publish_loop(), self.publication.catch_up_loop())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self) -> None:
        """Bring a new version to all servers, and make it current."""
        staged = await self.publication.stage(await self.queue.allocate_version(0))
        await self.publication.publish(staged, self.step, {})
        await self.publication.wait_until_published()

    async def make_steps(self, seconds: float) -> int:
        """Take, fetch and commit batch after batch. Returns the number of groups."""
        ends_at, num_groups = time.perf_counter() + seconds, 0
        groups_per_step = self.config.replay.groups_per_step
        taken: list[int] = []
        while time.perf_counter() < ends_at:
            some = await self.queue.take(self.step + 1, groups_per_step - len(taken))
            assert len(await self.queue.fetch(some)) == len(some)
            taken += some
            if len(taken) < groups_per_step:
                if not some:
                    await self.queue.wait_for_groups(WAIT_S)
                    await asyncio.sleep(GATHER_S)
                continue
            self.step += 1
            await self.queue.commit(self.step, taken)
            await self.queue.publish(self.publication.current or 0, self.step, b"")
            num_groups += len(taken)
            taken = []
        await self.queue.commit(self.step + 1, taken)
        self.step += 1
        return num_groups + len(taken)

    async def wait_for_servers(self, count: int) -> None:
        """Wait until `count` servers serve, and no others are left from before."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                servers = await self.fleet.servers()
                if len(servers) == count and all(server.state in SERVING_STATES for server in servers):
                    return
                await asyncio.sleep(0.5)

    async def forget_servers(self) -> None:
        """Forget the servers of the size before, and the connections to them."""
        for server in await self.fleet.servers():
            await self.fleet.leave(server.server_id)
        await asyncio.to_thread(self.weights.calls.close)
