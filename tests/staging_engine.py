"""An engine that stages and verifies weights like a real one, but has no model: it only hashes what it would load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from nccl_binding import NcclBinding
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.checksums import XXH3_PIECES, host_checksum, weights_digest
from penstock_rollout.engines.engine import CommitReport, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.weights.stage import WeightStage
from push_faults import Fault, Say


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

    def stage(self, announcement: bytes) -> None:
        self.abort()
        request = weights_pb2.AnnounceRequest.FromString(announcement)
        self._stage = WeightStage(request, self.model_path, worker=self.index, device=self.device, last=self.loaded)
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
