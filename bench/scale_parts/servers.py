"""A process of bench/scale.py: many rollout servers without a model.

Each has what a rollout server has towards the others: its membership, its listener for weight pushes and generate
calls, and its producer with the loops for leases, heartbeats, appends and the outbox. Only the engine is missing: a
group is ready after a pause, and a generate call is answered at once. The servers of one process share their
connections, except those on which they wait for prompts.

It reads commands from its input, one a line, and answers each with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.config.service import ReplayConfig
from penstock.internal_calls import ClusterKey
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.store.fleet import Fleet, PolicyRegistry, Reported, ServerRecord
from penstock.store.redis_client import RedisClient, connect
from penstock.trajectory import Group, Prompt, Trajectory, VersionSegment
from penstock.v1 import generate_pb2, generate_pb2_grpc, groups_pb2, weights_pb2, weights_pb2_grpc
from penstock_rollout.engines.engine import CommitReport, EngineStats
from penstock_rollout.fleet import membership
from penstock_rollout.fleet.membership import FleetMembership, WeightMember, make_listener
from penstock_rollout.groups import producer
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from scale_parts.fleet import p99

NUM_SAMPLES, NUM_TOKENS, NUM_ANSWERED = 8, 64, 8


class NoEngine:
    """Takes every version that is announced, at once."""

    name = "none"
    weights_digest = ""
    retained_version: int | None = None
    devices = ("cpu",)

    def __init__(self) -> None:
        self.policy_version = 0

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None: ...

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        self.policy_version = policy_version
        return CommitReport(0.0, 0.0, 0.0, 0)

    async def abort_weights(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)


class PausingMaker:
    """Answers each prompt with the same samples after `generate_s`, give or take half of it."""

    def __init__(self, server_id: str, engine: NoEngine, generate_s: float) -> None:
        self.server_id = server_id
        self.engine = engine
        self.generate_s = generate_s
        self.random = random.Random(server_id)

    async def make(self, lease: Lease, prompt: Prompt, note_running: Callable[[int, int], None]) -> Group:
        version = self.engine.policy_version
        await asyncio.sleep(self.generate_s * self.random.uniform(0.5, 1.5))
        trajectory = Trajectory(
            token_ids=np.arange(NUM_TOKENS, dtype=np.int32), loss_mask=np.ones(NUM_TOKENS, np.uint8),
            log_probs=np.full(NUM_TOKENS, -0.5, np.float32), segments=(VersionSegment(0, NUM_TOKENS, version),),
            reward=1.0,
        )  # fmt: skip
        return Group(
            run="scale", prompt_id=lease.prompt_id, attempt=lease.attempt, server_id=self.server_id,
            data_source=prompt.data_source, sampling=prompt.sampling,
            prompt_token_ids=np.arange(NUM_TOKENS, dtype=np.int32), trajectories=(trajectory,) * NUM_SAMPLES,
            finished_at_ms=int(time.time() * 1000),
        )  # fmt: skip


class TimedQueue(RedisReplayQueue):
    """Records how long leases take."""

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig, times_s: list[float]) -> None:
        super().__init__(client, run, config)
        self.times_s = times_s

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        started = time.perf_counter()
        leases = await super().lease(server_id, max_prompts)
        self.times_s.append(time.perf_counter() - started)
        return leases


class TimedFleet(Fleet):
    """Records how long reports take, and holds them back while the cost of something else is measured."""

    def __init__(self, client: RedisClient, run: str, times_s: list[float], may_report: asyncio.Event) -> None:
        super().__init__(client, run)
        self.times_s = times_s
        self.may_report = may_report

    async def report(self, record: ServerRecord) -> Reported:
        await self.may_report.wait()
        started = time.perf_counter()
        answer = await super().report(record)
        self.times_s.append(time.perf_counter() - started)
        return answer


class Answers(generate_pb2_grpc.GenerateServiceServicer):
    """Answers every generate call with one chunk."""

    def __init__(self, server_id: str, engine: NoEngine) -> None:
        self.server_id = server_id
        self.engine = engine

    async def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        tokens = np.arange(NUM_ANSWERED, dtype=np.int32)
        yield generate_pb2.GenerateChunk(
            text="42", token_ids=tokens.tobytes(), log_probs=np.zeros(NUM_ANSWERED, np.float32).tobytes(),
            segments=[
                groups_pb2.VersionSegment(start=0, end=NUM_ANSWERED, policy_version=self.engine.policy_version)
            ],
            finish_reason=groups_pb2.Trajectory.STOP, prompt_token_ids=tokens.tobytes(), server_id=self.server_id,
        )  # fmt: skip


class Servers:
    """`count` servers, from `server-FIRST` on, each with `places` groups at a time."""

    def __init__(self, config: RunConfig, first: int, count: int, places: int, generate_s: float) -> None:
        self.config = config
        self.numbers = range(first, first + count)
        self.places = places
        self.generate_s = generate_s
        self.times_s: dict[str, list[float]] = {"lease": [], "report": []}
        self.client = connect(config.redis, max_connections=2 * count + 100)
        self.metrics = RolloutMetrics(CollectorRegistry())
        self.listeners: list[grpc.aio.Server] = []
        self.may_lease = False
        self.may_report = asyncio.Event()

    async def run(self) -> None:
        self.may_report.set()
        async with asyncio.TaskGroup() as tasks:
            for number in self.numbers:
                await self._start(f"server-{number:04}", tasks)
            await asyncio.to_thread(print, json.dumps({"started": len(self.numbers)}), flush=True)
            await self._answer()

    async def _start(self, server_id: str, tasks: asyncio.TaskGroup) -> None:
        config, run, engine = self.config, self.config.run, NoEngine()
        fleet = TimedFleet(self.client, run, self.times_s["report"], self.may_report)
        member = WeightMember(run, engine, self.metrics, fleet.term)  # type: ignore[arg-type]
        listener = make_listener(ClusterKey.of(config))
        weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(Answers(server_id, engine), listener)
        port = listener.add_insecure_port("127.0.0.1:0")
        await listener.start()
        self.listeners.append(listener)  # it ends when nothing holds it
        belonging = FleetMembership(
            config, server_id, engine, fleet, PolicyRegistry(self.client, run),  # type: ignore[arg-type]
            member, self.metrics,
        )  # fmt: skip
        await belonging.join(f"127.0.0.1:{port}")
        maker = PausingMaker(server_id, engine, self.generate_s)
        rollout = config.rollout.model_copy(update={"max_concurrent_groups": self.places})
        queue = TimedQueue(self.client, run, config.replay, self.times_s["lease"])
        work = Producer(
            queue, server_id, maker, rollout, config.replay, self.metrics,  # type: ignore[arg-type]
            lambda: self.may_lease and belonging.may_lease(),
        )  # fmt: skip
        for loop in (
            belonging.report_loop(lambda: work.num_running), work.lease_loop(), work.heartbeat_loop(),
            work.reconcile_loop(),
        ):  # fmt: skip
            tasks.create_task(loop)

    async def _answer(self) -> None:
        """Answer each line of the input with the p99 of the calls since the last one. `lease` lets the servers report
        and lease prompts, `hold` lets them report, and `silence` lets them answer calls only."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            self.may_lease = line.strip() == "lease"
            if line.strip() == "silence":
                self.may_report.clear()
            else:
                self.may_report.set()
            answer = {name: p99(times) for name, times in self.times_s.items()}
            for times in self.times_s.values():
                times.clear()
            await asyncio.to_thread(print, json.dumps(answer), flush=True)
        sys.exit(0)


async def main() -> None:
    path, first, count, places, generate_s, slower = sys.argv[1:]
    membership.REPORT_S *= float(slower)
    producer.WAIT_S *= float(slower)
    producer.NOT_READY_POLL_S = 1.0  # nothing waits for it here, and it would take much of a core
    config = load_config(Path(path))
    await Servers(config, int(first), int(count), int(places), float(generate_s)).run()


if __name__ == "__main__":
    asyncio.run(main())
