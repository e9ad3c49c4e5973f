"""A member of the weight group as a process of its own: the real gRPC service and stage, and no model.

    python member_process.py CONFIG_YAML NUM_WORKERS [FAULT@PHASE]

FAULT is die or stop (SIGSTOP), PHASE one of announce, receive, commit, load. Prints one JSON object a line: its port,
then every version it loads with the digest of the bytes it would serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from penstock.config.loading import load_config
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2_grpc
from penstock.weights.checksums import XXH3, host_checksum, weights_digest
from penstock_rollout.engines.engine import CommitReport, EngineStats, GenerateRequest, StageRequest, TokenChunk
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.receivers import stage as stage_module
from penstock_rollout.receivers.reception import Arrived, Reception, Receiver, find_receiver
from penstock_rollout.receivers.stage import WeightStage
from penstock_rollout.weight_member import WeightMember


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Fault:
    """Happens once, the first time its phase is reached."""

    def __init__(self, text: str) -> None:
        self.kind, _, self.phase = text.partition("@")

    def at(self, phase: str) -> None:
        if phase != self.phase:
            return
        self.phase = ""
        say(fault=self.kind, at=phase)
        if self.kind == "die":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # the signal takes effect


class StagingEngine:
    """Stages like an engine with several workers; what it would serve is the bytes it loaded last."""

    name = "staging"

    def __init__(self, num_workers: int, model_path: Path, fault: Fault) -> None:
        self.devices = ("cpu",) * num_workers
        self.policy_version = 0
        self.model_path = model_path
        self.fault = fault
        self.stages: list[WeightStage] = []
        self.loaded: list[WeightStage | None] = [None] * num_workers

    @property
    def retained_version(self) -> int | None:
        loaded = self.loaded[0]
        return loaded.manifest.policy_version if loaded and loaded.manifest.retain else None

    async def stage_weights(self, request: StageRequest) -> None:
        self.fault.at("announce")
        await self.abort_weights()
        self.stages = [
            WeightStage(request, self.model_path, worker=worker, last=self.loaded[worker])
            for worker in range(len(self.devices))
        ]
        for stage in self.stages:
            stage.start()

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        self.fault.at("commit")
        if not self.stages or self.stages[0].manifest.policy_version != policy_version:
            raise WeightPushFailed(f"version {policy_version} is not staged")
        for stage in self.stages:
            try:
                await asyncio.wait_for(asyncio.wrap_future(stage.done), timeout_s)
            except TimeoutError as error:
                raise WeightPushFailed("late") from error
            if why := stage.failure or stage.mismatch(bucket_checksums):
                raise WeightPushFailed(why)
        self.fault.at("load")
        digests = {_digest(stage) for stage in self.stages}
        receive_s = max(stage.receive_s for stage in self.stages)
        self.loaded, self.stages = list(self.stages), []
        self.policy_version = policy_version
        say(version=policy_version, digests=sorted(digests))
        return CommitReport(receive_s=receive_s, load_s=0.0, paused_s=0.0, running_requests=0)

    async def abort_weights(self) -> None:
        for stage in self.stages:
            stage.abort()
        self.stages = []

    async def start(self, policy_version: int) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...

    async def check_health(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError
        yield


def _digest(stage: WeightStage) -> str:
    """Over what would be loaded, hashed here: nothing that travelled is believed."""
    return weights_digest([host_checksum(XXH3, bucket.numpy()) for bucket in stage.buckets])


def with_fault(fault: Fault) -> None:
    """Let the fault happen after the first bucket that arrives."""

    def find(transport: str) -> Receiver:
        inner = find_receiver(transport)

        def receive(reception: Reception) -> Iterator[Arrived]:
            for arrived in inner(reception):
                yield arrived
                fault.at("receive")

        return receive

    stage_module.find_receiver = find


async def main(config_file: str, num_workers: str, fault: str = "") -> None:
    config = load_config(Path(config_file), [])
    wanted = Fault(fault)
    with_fault(wanted)
    engine = StagingEngine(int(num_workers), config.model.path, wanted)
    member = WeightMember(config.run, engine, config.weights, RolloutMetrics(CollectorRegistry()))
    listener = grpc.aio.server()
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    say(port=listener.add_insecure_port("127.0.0.1:0"))
    await listener.start()
    await listener.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
