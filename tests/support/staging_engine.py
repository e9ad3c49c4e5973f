"""An engine that stages and verifies weights like a real one but only hashes them, and the faults of a push to it.

A fault is `KIND@PHASE`, or `KIND@PHASE#N` for the Nth time that the phase is reached:

| kind       | what happens                                                                    |
|------------|---------------------------------------------------------------------------------|
| die        | the process is killed                                                           |
| stop       | the process is stopped (SIGSTOP), until the test continues it                   |
| slow       | the process pauses for SLOW_S                                                   |
| disconnect | for DISCONNECTED_S, its TCP connections break, except those of its gRPC service |

Phases of a member: announce, meeting, start, connection, first bucket, middle, receive, commit, load. Of a publisher:
meeting, start, connection, first bucket, middle, commit. Those from `meeting` to `middle` exist with nccl only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.cuda import NcclGroup
from penstock.weights.transports import XXH3_PIECES, Deadline, host_checksum, weights_digest
from penstock_learner.weights.publisher import MemberCalls
from penstock_rollout.engines.engine import CommitReport, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.stage import Arrived, JoinedGroups, Receiver, Reception, WeightStage, find_receiver
from support.cuda_stand_ins import NcclBinding

SLOW_S = 1.0
DISCONNECTED_S = 0.3
MEETING_S = 0.01
"""Time between the begin of a meeting and its fault."""
NUM_BEFORE_MIDDLE = 8
"""Number of waits for a broadcast that end before the middle of a push."""

Say = Callable[..., None]


class Fault:
    """Happens once, when its phase is reached."""

    def __init__(self, text: str, say: Say) -> None:
        self.kind, _, phase = text.partition("@")
        self.phase, _, number = phase.partition("#")
        self._num_left = int(number or 1)
        self.say = say
        self.grpc_port = 0

    def at(self, phase: str) -> None:
        if phase != self.phase:
            return
        self._num_left -= 1
        if self._num_left:
            return
        self.phase = ""
        self.say(fault=self.kind, at=phase)
        if self.kind == "slow":
            time.sleep(SLOW_S)
        elif self.kind == "disconnect":
            ends_at = time.monotonic() + DISCONNECTED_S
            while time.monotonic() < ends_at:
                disconnect(self.grpc_port)
                time.sleep(0.005)
            self.say(connected=True)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGSTOP)
            time.sleep(0.2)  # until the signal takes effect


def disconnect(spared_port: int) -> None:
    """Shut down every TCP connection of this process whose local port is not the spared one."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_tcp and not is_listening and found.getsockname()[1] != spared_port:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or not connected


def inject(fault: Fault) -> None:
    """Make the fault happen in this process, at the phases of a transfer and at a publisher's commit."""
    _inject_into_receivers(fault)
    _inject_into_groups(fault)
    commit = MemberCalls.commit

    def faulty_commit(self: MemberCalls, members: Any, request: Any) -> Any:
        fault.at("commit")
        return commit(self, members, request)

    MemberCalls.commit = faulty_commit  # type: ignore[method-assign]


def _inject_into_receivers(fault: Fault) -> None:
    """`receive`: the first bucket has arrived, by any transport."""

    def find(transport: str) -> Receiver:
        inner = find_receiver(transport)

        def receive(reception: Reception) -> Iterator[Arrived]:
            for arrived in inner(reception):
                yield arrived
                fault.at("receive")

        return receive

    stage_module.find_receiver = find


def _inject_into_groups(fault: Fault) -> None:
    """`meeting`: the ranks are meeting. `start`: they have met, and NCCL is about to start. `connection`: it starts to
    connect them. `first bucket`: it is enqueued. `middle`: half of the buckets arrived."""
    start, broadcast, wait = NcclGroup.open, NcclGroup.broadcast, NcclGroup.wait
    num_waits = 0

    def faulty_open(self: NcclGroup, deadline: Deadline, meet: Callable[[], bytes]) -> None:
        def faulty_meet() -> bytes:
            unique_id = meet()
            fault.at("start")
            return unique_id

        if fault.kind == "slow":
            fault.at("meeting")
        else:
            threading.Timer(MEETING_S, fault.at, ["meeting"]).start()
        start(self, deadline, faulty_meet)

    def faulty_broadcast(self: NcclGroup, *arguments: Any, **named: Any) -> int:
        if not self.is_open:
            fault.at("connection")
        event = broadcast(self, *arguments, **named)
        if self.is_open:
            fault.at("first bucket")
        return event

    def faulty_wait(self: NcclGroup, event: int, deadline: Deadline) -> None:
        nonlocal num_waits
        wait(self, event, deadline)
        if self.is_open:
            num_waits += 1
            if num_waits == NUM_BEFORE_MIDDLE:
                fault.at("middle")

    NcclGroup.open = faulty_open  # type: ignore[method-assign]
    NcclGroup.broadcast = faulty_broadcast  # type: ignore[method-assign]
    NcclGroup.wait = faulty_wait  # type: ignore[method-assign]


class Worker(Protocol):
    """One tensor-parallel worker. It has one stage at a time, and keeps the one that it loaded last."""

    def stage(self, announcement: bytes) -> None: ...

    def verify(self, policy_version: int, bucket_checksums: Sequence[str], timeout_s: float) -> str:
        """Wait for the stage. Returns why it cannot be loaded, or an empty string."""
        ...

    def load(self, *, with_digests: bool) -> dict[str, Any]:
        """Make the stage the loaded one. Returns its time, and its digests if asked."""
        ...

    def abort(self) -> None: ...


class LocalWorker:
    """A worker in the engine's process."""

    def __init__(self, index: int, model_path: Path, device: torch.device) -> None:
        self.index = index
        self.model_path = model_path
        self.device = device
        self.loaded: WeightStage | None = None
        self._stage: WeightStage | None = None
        self._groups = JoinedGroups()

    def stage(self, announcement: bytes) -> None:
        self.abort()
        request = weights_pb2.AnnounceRequest.FromString(announcement)
        self._stage = WeightStage(
            request, self.model_path, worker=self.index, device=self.device, last=self.loaded, groups=self._groups
        )
        self._stage.start()

    def verify(self, policy_version: int, bucket_checksums: Sequence[str], timeout_s: float) -> str:
        stage = self._stage
        if stage is None or stage.manifest.policy_version != policy_version:
            return f"version {policy_version} is not staged"
        try:
            stage.done.result(timeout_s)
        except TimeoutError:
            return "late"
        return stage.failure or stage.mismatch(bucket_checksums)

    def load(self, *, with_digests: bool) -> dict[str, Any]:
        stage, self._stage = self._stage, None
        assert stage is not None, "load follows verify"
        self.loaded = stage
        digests = {"digest": digest_of(stage.buckets), "tensors": tensors_digest(stage)} if with_digests else {}
        return {"receive_s": stage.receive_s} | digests

    def abort(self) -> None:
        if self._stage is not None:
            self._stage.abort()
            self._stage = None


class ForkedWorker:
    """A worker in a process of its own, as a tensor-parallel engine has. Ends with the process that made it."""

    def __init__(self, index: int, model_path: Path, binding: NcclBinding) -> None:
        self._pipe, theirs = Pipe()
        if os.fork() == 0:
            self._pipe.close()
            try:
                serve_worker(theirs, LocalWorker(index, model_path, binding.device), binding)
            finally:
                os._exit(0)
        theirs.close()

    def stage(self, announcement: bytes) -> None:
        self._pipe.send(("stage", {"announcement": announcement}))

    def verify(self, policy_version: int, bucket_checksums: Sequence[str], timeout_s: float) -> str:
        arguments = {"policy_version": policy_version, "bucket_checksums": bucket_checksums, "timeout_s": timeout_s}
        self._pipe.send(("verify", arguments))
        return str(self._pipe.recv())

    def load(self, *, with_digests: bool) -> dict[str, Any]:
        self._pipe.send(("load", {"with_digests": with_digests}))
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def abort(self) -> None:
        self._pipe.send(("abort", {}))


def serve_worker(pipe: Connection, worker: LocalWorker, binding: NcclBinding) -> None:
    """The main function of a worker's process. Returns when the engine's process has ended."""
    binding.install()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        answer = getattr(worker, method)(**arguments)
        if answer is not None:
            pipe.send(answer)


class StagingEngine:
    """Stages weights like an engine with several workers. It would serve the bytes that it loaded last."""

    name = "staging"

    def __init__(self, workers: Sequence[Worker], devices: tuple[str, ...], fault: Fault, say: Say | None) -> None:
        self.say = say
        self.devices = devices
        self.policy_version = 0
        self.weights_digest = ""
        self.fault = fault
        self.workers = workers

    @property
    def retained_version(self) -> int | None:
        first = self.workers[0]
        loaded = first.loaded if isinstance(first, LocalWorker) else None
        return loaded.kept_version if loaded else None

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self.fault.at("announce")
        for worker in self.workers:
            worker.stage(announcement.SerializeToString())

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        self.fault.at("commit")
        verified = (
            asyncio.to_thread(worker.verify, policy_version, bucket_checksums, timeout_s) for worker in self.workers
        )
        for why in await asyncio.gather(*verified):
            if why:
                raise WeightPushFailed(why)
        self.fault.at("load")
        loads = [worker.load(with_digests=self.say is not None) for worker in self.workers]
        self.policy_version, self.weights_digest = policy_version, weights_digest(bucket_checksums)
        if self.say is not None:
            self.say(
                version=policy_version,
                digests=sorted({load["digest"] for load in loads}),
                tensors=sorted({load["tensors"] for load in loads}),
            )
        receive_s = max(load["receive_s"] for load in loads)
        return CommitReport(receive_s=receive_s, load_s=0.0, paused_s=0.0, running_requests=0)

    async def abort_weights(self) -> None:
        for worker in self.workers:
            worker.abort()

    async def start(self, policy_version: int) -> None: ...

    async def stop(self) -> None: ...

    async def check_health(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError
        yield


def digest_of(buckets: Sequence[torch.Tensor]) -> str:
    """Hash buckets here, without relying on checksums that were sent."""
    return weights_digest([host_checksum(XXH3_PIECES, bucket.cpu().numpy()) for bucket in buckets])


def tensors_digest(stage: WeightStage) -> str:
    """Hash the tensors that an engine would load. They differ from the buckets if the push was an adapter."""
    return named_digest(dict(stage.tensors()))


def named_digest(tensors: dict[str, torch.Tensor]) -> str:
    raw = {name: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return weights_digest([f"{name} {host_checksum(XXH3_PIECES, raw[name].numpy())}" for name in sorted(raw)])
