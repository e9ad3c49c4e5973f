"""Compares cuda_ipc between two processes with a copy of the same bytes on the GPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from harness import Child, Results, alternate, median_ratio, say
from penstock.v1 import weights_pb2
from penstock.weights.cuda import IpcOffer, Mappings
from penstock.weights.transports import Deadline, TensorShape, build_manifest, weights_digest
from penstock_learner.weights.senders import CudaIpcSender, Shipment
from penstock_learner.weights.staging import MemoryPool, StagedVersion, checksum_name
from penstock_rollout.weights.receivers import cuda_ipc
from penstock_rollout.weights.stage import (
    JoinedGroups,
    Reception,
    WeightStage,
    alongside_engine,
    bucket_checksum,
    find_receiver,
)

DEVICE = torch.device("cuda", 0)
BUCKET_BYTES = 64 * 2**20
TENSOR_SHAPE = (2048, 4096)
"""16 MiB in bfloat16."""
NUM_ROUNDS = 7
NUM_PUSHES = 20
TIMEOUT_S = 60.0


class IpcPublisher:
    """The publisher's process. It stages versions of random weights and offers them."""

    def __init__(self, num_tensors: int) -> None:
        self._shapes = [TensorShape(f"w{index}", "BF16", TENSOR_SHAPE) for index in range(num_tensors)]
        self._source = torch.rand(TENSOR_SHAPE, device=DEVICE, dtype=torch.bfloat16)
        self._sender = CudaIpcSender(DEVICE)
        self._memory = MemoryPool(DEVICE)
        self._staged: StagedVersion | None = None

    def stage(self, version: int) -> tuple[float, bytes, list[str]]:
        """Stage and hash a version. Returns the seconds it took, the manifest and the checksums."""
        started = time.monotonic()
        if self._staged is not None:
            self._memory.give_back(self._staged.memory)
        manifest = build_manifest("bench", version, 1, self._shapes, BUCKET_BYTES)
        memory = self._memory.take("device", [bucket.num_bytes for bucket in manifest.buckets])
        manifest.checksum = checksum_name(memory)
        staged = self._staged = StagedVersion(manifest, memory)
        for index, shape in enumerate(self._shapes):
            staged.put(shape.name, self._source * (version + index))
        checksums = staged.checksums(Deadline(TIMEOUT_S, "hashing"))
        return time.monotonic() - started, manifest.SerializeToString(), checksums

    def offer(self) -> str:
        assert self._staged is not None
        shipment = Shipment(self._staged.manifest, self._staged)
        rendezvous = self._sender.open(shipment, [], Deadline(TIMEOUT_S, "opening"))
        self._sender.send(shipment, [], Deadline(TIMEOUT_S, "sending"))
        return rendezvous


class IpcMember:
    """The member runs in this process. It does what a worker does, without an engine."""

    def __init__(self, publisher: Child) -> None:
        self._publisher = publisher
        self.manifest = weights_pb2.WeightManifest()
        self.checksums: list[str] = []
        self.received: list[torch.Tensor] = []

    def stage(self, version: int) -> float:
        seconds, manifest, self.checksums = self._publisher.call("stage", version)
        self.manifest = weights_pb2.WeightManifest.FromString(manifest)
        return float(seconds)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.manifest.buckets)

    def transfer(self) -> float:
        """GB/s of the receiver alone, from the offer to the last bucket. Unmapping comes after that."""
        rendezvous = self._publisher.call("offer")
        deadline = Deadline(TIMEOUT_S, "receiving")
        reception = Reception(self._announcement(rendezvous), DEVICE, deadline, JoinedGroups(), worker_device=DEVICE)
        self.received = []
        started = time.monotonic()
        with alongside_engine(DEVICE):
            for arrived in find_receiver("cuda_ipc")(reception):
                self.received.append(arrived.wire)
                last_at = time.monotonic()
        return self.num_bytes / (last_at - started) / 1e9

    def mapping(self) -> list[float]:
        """Seconds to map the publisher's memory, and seconds to unmap it."""
        handle = bytes.fromhex(IpcOffer.from_json(self._publisher.call("offer")).handle)
        cuda_ipc.mappings.close()
        mappings = Mappings()
        started = time.monotonic()
        with mappings.opened(handle, 0, 1):
            mapped = time.monotonic()
        mappings.close()
        return [mapped - started, time.monotonic() - mapped]

    def verify(self) -> float:
        """GB/s of the checksum over the received bytes."""
        started = time.monotonic()
        found = [bucket_checksum(self.manifest.checksum, bucket) for bucket in self.received]
        rate = self.num_bytes / (time.monotonic() - started) / 1e9
        assert weights_digest(found) == weights_digest(self.checksums), "the received bytes differ from those sent"
        return rate

    def push(self) -> float:
        """Seconds from the offer to a received and verified stage."""
        started = time.monotonic()
        rendezvous = self._publisher.call("offer")
        stage = WeightStage(self._announcement(rendezvous), Path("unused"), device=DEVICE)
        stage.start()
        stage.done.result(TIMEOUT_S)
        seconds = time.monotonic() - started
        why = stage.failure or stage.mismatch(self.checksums)
        assert not why, why
        assert stage.buckets[0].is_cuda
        return seconds

    def _announcement(self, rendezvous: str) -> weights_pb2.AnnounceRequest:
        return weights_pb2.AnnounceRequest(
            manifest=self.manifest, transport="cuda_ipc", rendezvous=rendezvous, rank=1, world_size=2,
            deadline_s=TIMEOUT_S,
        )  # fmt: skip


def copy_rate(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """GB/s of copying buckets inside the GPU, which is the limit of cuda_ipc."""
    num_bytes = sum(source.numel() for source in sources)
    stream = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    started = time.monotonic()
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
    stream.synchronize()
    return num_bytes / (time.monotonic() - started) / 1e9


def bench_ipc(gigabytes: list[float]) -> Results:
    results = Results()
    for size in gigabytes:
        num_tensors = max(1, round(size * 1e9 / (TENSOR_SHAPE[0] * TENSOR_SHAPE[1] * 2)))
        say(f"ipc: {size:g} GB, {num_tensors} tensors")
        publisher = Child(IpcPublisher, num_tensors)
        try:
            _bench_ipc(results, f"{size:g} GB", IpcMember(publisher))
        finally:
            publisher.stop()
    return results


def _bench_ipc(results: Results, size: str, member: IpcMember) -> None:
    member.stage(1)
    sizes = [bucket.num_bytes for bucket in member.manifest.buckets]
    sources, targets = ([torch.ones(n, dtype=torch.uint8, device=DEVICE) for n in sizes] for _ in range(2))
    contenders: dict[str, Any] = {
        f"cuda_ipc, {size}": member.transfer,
        f"verify, {size}": member.verify,
        f"copy inside the GPU, {size}": lambda: copy_rate(sources, targets),
    }
    ours, verify, limit = alternate(contenders, NUM_ROUNDS, "GB/s").values()
    for measurement in (ours, verify, limit):
        results.add(measurement.name, "GB/s", *measurement.rates)
    results.add(f"cuda_ipc transfer, {size}", "ms", *(1e-6 * member.num_bytes / rate for rate in ours.rates))
    results.bar(f"cuda_ipc / copy, {size}", median_ratio(ours, limit), 0.6)
    mappings = [member.mapping() for _ in range(NUM_ROUNDS)]
    results.add(f"mapping, {size}", "ms", *(1e3 * mapped for mapped, _ in mappings))
    results.add(f"unmapping, {size}", "ms", *(1e3 * unmapped for _, unmapped in mappings))
    sources.clear()
    targets.clear()
    member.received = []
    stagings, pushes = [], []
    for version in range(2, 2 + 2 + NUM_PUSHES):
        stagings.append(member.stage(version))
        pushes.append(member.push())
    results.add(f"staging and hashing at the publisher, {size}", "ms", *(1e3 * s for s in stagings[2:]))
    results.add(f"push, received and verified, {size}", "ms", *(1e3 * s for s in pushes[2:]))
    half = NUM_PUSHES // 2
    flat = statistics.median(pushes[-half:]) / statistics.median(pushes[2 : 2 + half])
    results.bar(f"the last {half} of {NUM_PUSHES} pushes to the first {half}, {size}", flat, 1.2, at_most=True)
