"""A member of the weight group in a separate process, with the real gRPC service and stage, but without a model.

A fault is `die@PHASE` or `stop@PHASE` (SIGSTOP), where PHASE is announce, receive, commit or load. The member writes a
file with one JSON object per line: its port, then each version that it loads, with the digest of the loaded bytes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from cuda_stand_in import RuntimeStandIn
from nccl_stand_in import NcclStandIn
from penstock.config.loading import load_config
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.checksums import XXH3, host_checksum, weights_digest
from penstock.weights.cluster_key import ClusterKey
from penstock.weights.cuda import libraries
from penstock.weights.transports import host_id
from penstock_learner.weights.senders.sender import PushTarget
from penstock_rollout.engines.engine import CommitReport, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.fleet.weight_member import WeightMember
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.available import available_transports
from penstock_rollout.weights.reception import Arrived, Receiver, Reception, find_receiver
from penstock_rollout.weights.stage import WeightStage

Say = Callable[..., None]


class Fault:
    """Happens once, when its phase is reached for the first time."""

    def __init__(self, text: str, say: Say) -> None:
        self.kind, _, self.phase = text.partition("@")
        self.say = say

    def at(self, phase: str) -> None:
        if phase != self.phase:
            return
        self.phase = ""
        self.say(fault=self.kind, at=phase)
        if self.kind == "die":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # until the signal takes effect


class StagingEngine:
    """Stages weights like an engine with several workers. It would serve the bytes that it loaded last."""

    name = "staging"

    def __init__(self, num_workers: int, model_path: Path, fault: Fault, say: Say | None) -> None:
        self.say = say
        self.devices = ("cpu",) * num_workers
        self.policy_version = 0
        self.weights_digest = ""
        self.model_path = model_path
        self.fault = fault
        self.stages: list[WeightStage] = []
        self.loaded: list[WeightStage | None] = [None] * num_workers

    @property
    def retained_version(self) -> int | None:
        loaded = self.loaded[0]
        return loaded.manifest.policy_version if loaded and loaded.manifest.retain else None

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self.fault.at("announce")
        await self.abort_weights()
        self.stages = [
            WeightStage(announcement, self.model_path, worker=worker, last=self.loaded[worker])
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
        receive_s = max(stage.receive_s for stage in self.stages)
        self.loaded, self.stages = list(self.stages), []
        self.policy_version, self.weights_digest = policy_version, weights_digest(bucket_checksums)
        if self.say is not None:
            self.say(version=policy_version, digests=sorted({_digest(stage) for stage in self.loaded if stage}))
        return CommitReport(receive_s=receive_s, load_s=0.0, paused_s=0.0, running_requests=0)

    async def abort_weights(self) -> None:
        for stage in self.stages:
            stage.abort()
        self.stages = []

    async def start(self, policy_version: int) -> None: ...

    async def stop(self) -> None: ...

    async def check_health(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError
        yield


def _digest(stage: WeightStage) -> str:
    """Hash the loaded bytes here, without relying on checksums that were sent."""
    return weights_digest([host_checksum(XXH3, bucket.numpy()) for bucket in stage.buckets])


def install_nccl_stand_in() -> NcclStandIn:
    """Replace NCCL in this process by gloo, with pointers to host memory."""
    runtime = RuntimeStandIn()
    nccl = NcclStandIn(runtime)
    libraries.runtime = lambda: runtime
    libraries.nccl = lambda: nccl
    return nccl


def with_fault(fault: Fault) -> None:
    """Make the fault happen after the first bucket has arrived."""

    def find(transport: str) -> Receiver:
        inner = find_receiver(transport)

        def receive(reception: Reception) -> Iterator[Arrived]:
            for arrived in inner(reception):
                yield arrived
                fault.at("receive")

        return receive

    stage_module.find_receiver = find


async def _serve(config_file: Path, num_workers: int, fault_text: str, is_quiet: bool, say: Say) -> None:
    config = load_config(config_file)
    if config.weights.transport == "nccl":
        install_nccl_stand_in()
    fault = Fault(fault_text, say)
    with_fault(fault)
    engine = StagingEngine(num_workers, config.model.path, fault, None if is_quiet else say)
    member = WeightMember(
        config.run, engine, RolloutMetrics(CollectorRegistry()), read_term=lambda: asyncio.sleep(0, result=1)
    )
    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    say(port=port)
    await listener.wait_for_termination()


def run(config_file: Path, num_workers: int, fault: str, is_quiet: bool, output: Path) -> None:
    """Run a member. This is the main function of the process."""
    with output.open("w", buffering=1) as file:

        def say(**fields: object) -> None:
            file.write(json.dumps(fields) + "\n")

        asyncio.run(_serve(config_file, num_workers, fault, is_quiet, say))


@dataclass
class MemberProcess:
    """A running member, for the test to control."""

    process: Any
    output: Path
    num_workers: int

    @classmethod
    def start(
        cls, config_file: Path, output: Path, num_workers: int = 1, fault: str = "", *, is_quiet: bool = False
    ) -> MemberProcess:
        """Fork a member from a fork server that has imported everything. A quiet member does not report its loads."""
        context = multiprocessing.get_context("forkserver")
        here = str(Path(__file__).parent)
        if here not in os.environ.get("PYTHONPATH", ""):  # Python 3.11's fork server does not get sys.path
            os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
        context.set_forkserver_preload(["member_process"])
        process = context.Process(target=run, args=(config_file, num_workers, fault, is_quiet, output), daemon=True)
        process.start()
        member = cls(process, output, num_workers)
        member.wait_for("port")
        return member

    @property
    def target(self) -> PushTarget:
        devices = ("cpu",) * self.num_workers
        address = f"127.0.0.1:{self.wait_for('port')}"
        transports = ("nccl", *available_transports(devices))  # the stand-in provides it
        return PushTarget(f"member-{self.process.pid}", address, devices, host_id(), transports)

    @property
    def loads(self) -> list[tuple[int, list[str]]]:
        """The versions that it loaded, in order, each with the digests of its workers' bytes."""
        return [(line["version"], line["digests"]) for line in self._lines() if "version" in line]

    @property
    def has_hung(self) -> bool:
        """Whether its fault has happened."""
        return any("fault" in line for line in self._lines())

    def resume(self) -> None:
        """Continue the process after a SIGSTOP."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def wait_for(self, field: str, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self._lines():
                if field in line:
                    return line[field]
            time.sleep(0.02)
        raise AssertionError(f"the member did not say its {field} within {timeout_s} s: {self._lines()}")

    def _lines(self) -> list[dict[str, Any]]:
        if not self.output.exists():
            return []
        return [json.loads(line) for line in self.output.read_text().splitlines() if line.endswith("}")]
