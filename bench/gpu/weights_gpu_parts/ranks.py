"""Measures pushes between ranks in separate processes, which share one GPU: nccl against a raw broadcast, the
recovery from a member that is killed or stopped, and nccl from host memory against gloo.

The ranks meet over sockets on loopback (`be_a_host_of_its_own`): everything is real, except that the bandwidth is a
loopback's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from harness import Child, Results, alternate, be_a_host_of_its_own, median_ratio, save, say
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights import cuda
from penstock.weights.cuda import DeviceAllocation, NcclGroup
from penstock.weights.transports import Deadline, TensorShape, build_manifest
from penstock_learner.weights.senders import PushTarget, Shipment, make_sender
from penstock_learner.weights.staging import MemoryKind, MemoryPool, StagedVersion, checksum_name
from penstock_rollout.weights.stage import JoinedGroups, WeightStage

DEVICE = torch.device("cuda", 0)
HOST = "127.0.0.1"
BUCKET_BYTES = 64 * 2**20
TENSOR_SHAPE = (2048, 4096)
"""16 MiB in bfloat16."""
TIMEOUT_S = 60.0
FAULT_DEADLINE_S = 8.0
NUM_MEMBERS = 3
NUM_ROUNDS = 5
RECOVERY_S = 5.0
"""How much longer than the deadline a recovery may take."""


class RawRank:
    """A rank of a plain broadcast, with one call for all bytes, no buckets and no checksums. It is the limit."""

    def __init__(self, unique_id: bytes, rank: int, num_ranks: int, num_bytes: int) -> None:
        self._memory = DeviceAllocation(num_bytes, 0)
        self._group = NcclGroup(num_ranks, rank, 0)
        self._group.open(Deadline(TIMEOUT_S, "opening a raw group"), lambda: unique_id)

    def broadcast(self) -> tuple[float, float]:
        """Take part in a broadcast. Returns its begin and its end on the clock that all processes share."""
        deadline, started = Deadline(TIMEOUT_S, "a raw broadcast"), time.monotonic()
        group, memory = self._group, self._memory
        group.wait(group.broadcast(memory.pointer, memory.num_bytes, deadline, hold=memory), deadline)
        return started, time.monotonic()

    def close(self) -> None:
        self._group.abort()


class Rank:
    """What publisher and members have in common."""

    def __init__(self) -> None:
        be_a_host_of_its_own()
        self._raw: RawRank | None = None

    def open_raw(self, unique_id: bytes, rank: int, num_ranks: int, num_bytes: int) -> None:
        self._raw = RawRank(unique_id, rank, num_ranks, num_bytes)

    def broadcast_raw(self) -> tuple[float, float]:
        assert self._raw is not None
        return self._raw.broadcast()

    def close_raw(self) -> None:
        assert self._raw is not None
        self._raw.close()
        self._raw = None


class Publisher(Rank):
    """Stages random weights once, and sends them as often as asked."""

    def __init__(self, gigabytes: float, memory: MemoryKind) -> None:
        super().__init__()
        num_tensors = max(1, round(gigabytes * 1e9 / (TENSOR_SHAPE[0] * TENSOR_SHAPE[1] * 2)))
        shapes = [TensorShape(f"w{index}", "BF16", TENSOR_SHAPE) for index in range(num_tensors)]
        manifest = build_manifest("bench", 1, 1, shapes, BUCKET_BYTES)
        buckets = MemoryPool(DEVICE).take(memory, [bucket.num_bytes for bucket in manifest.buckets])
        manifest.checksum = checksum_name(buckets)
        self._staged = StagedVersion(manifest, buckets)
        source = torch.rand(TENSOR_SHAPE, device=DEVICE, dtype=torch.bfloat16)
        for index, shape in enumerate(shapes):
            self._staged.put(shape.name, source * (index + 1))
        self._checksums = self._staged.checksums(Deadline(TIMEOUT_S, "hashing"))
        self._senders: dict[str, Any] = {}
        self._sending: threading.Thread | None = None
        self._failure = ""

    def manifest(self) -> tuple[bytes, list[str]]:
        return self._staged.manifest.SerializeToString(), self._checksums

    def unique_id(self) -> bytes:
        unique_id: bytes = cuda.nccl().get_unique_id()
        return unique_id

    def open(self, transport: str, members: list[PushTarget], deadline_s: float) -> str:
        self._deadline = Deadline(deadline_s, "sending")
        self._members, self._shipment = members, Shipment(self._staged.manifest, self._staged)
        if transport not in self._senders:
            self._senders[transport] = make_sender(transport, HOST, DEVICE, gloo_group_size=32)
        self._sender = self._senders[transport]
        rendezvous: str = self._sender.open(self._shipment, members, self._deadline)
        return rendezvous

    def begin_send(self) -> float:
        """Send in a thread. Returns when it began."""
        self._failure, started = "", time.monotonic()

        def send() -> None:
            try:
                self._sender.send(self._shipment, self._members, self._deadline)
            except WeightPushFailed as error:
                self._failure = str(error)
            self._sender.close(failed=bool(self._failure))

        self._sending = threading.Thread(target=send)
        self._sending.start()
        return started

    def end_send(self) -> str:
        """Wait for the end. Returns why it failed, if it did."""
        assert self._sending is not None
        self._sending.join(TIMEOUT_S)
        return self._failure


class Member(Rank):
    """Receives and verifies a version, in the memory of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._stage: WeightStage | None = None
        self._last: WeightStage | None = None
        self._groups = JoinedGroups()

    def receive(self, manifest: bytes, transport: str, rendezvous: str, rank: int, num_ranks: int, s: float) -> None:
        announcement = weights_pb2.AnnounceRequest(
            manifest=weights_pb2.WeightManifest.FromString(manifest), transport=transport, rendezvous=rendezvous,
            rank=rank, world_size=num_ranks, deadline_s=s,
        )  # fmt: skip
        self._stage = WeightStage(announcement, Path("unused"), device=DEVICE, last=self._last, groups=self._groups)
        self._stage.start()

    def finish(self, checksums: list[str]) -> tuple[float, str]:
        """Wait for the version. Returns when it was verified, and why it is wrong if it is."""
        stage = self._stage
        assert stage is not None
        stage.done.result(TIMEOUT_S)
        ended, self._last = time.monotonic(), stage if stage.phase == "received" else None
        return ended, stage.failure or stage.mismatch(checksums)

    def abort(self) -> str:
        """Abort the stage, and drop its group as a worker does after a failure."""
        assert self._stage is not None
        self._stage.abort()
        self._stage.done.result(TIMEOUT_S)
        return self._stage.failure

    def forget(self) -> None:
        """Free the buffers and leave all groups."""
        self._stage = self._last = None
        for joined in list(self._groups.joined):
            self._groups.drop(joined)
        torch.cuda.empty_cache()


class Ranks:
    """A publisher and members, each a process. Calls them so that all take part at the same time."""

    def __init__(self, num_members: int, gigabytes: float, memory: MemoryKind) -> None:
        self.publisher = Child(Publisher, gigabytes, memory)
        self.members = [Child(Member) for _ in range(num_members)]
        manifest, self.checksums = self.publisher.call("manifest")
        self.manifest = manifest
        buckets = weights_pb2.WeightManifest.FromString(manifest).buckets
        self.num_bytes = sum(bucket.num_bytes for bucket in buckets)

    def begin(self, transport: str, members: list[Child], deadline_s: float = TIMEOUT_S) -> float:
        """Begin a push. Returns when the sender began."""
        targets = [PushTarget(f"m{self.members.index(child)}", "", ("GPU",)) for child in members]
        rendezvous = self.publisher.call("open", transport, targets, deadline_s)
        for rank, child in enumerate(members, start=1):
            child.call("receive", self.manifest, transport, rendezvous, rank, len(members) + 1, deadline_s)
        started: float = self.publisher.call("begin_send")
        return started

    def push(self, transport: str, members: list[Child] | None = None) -> tuple[float, float]:
        """Push to the members. Returns when it began, and when the last member had verified it."""
        chosen = self.members if members is None else members
        started = self.begin(transport, chosen)
        failure = self.publisher.call("end_send")
        assert not failure, failure
        ends = [child.call("finish", self.checksums) for child in chosen]
        wrong = [why for _, why in ends if why]
        assert not wrong, wrong
        return started, max(ended for ended, _ in ends)

    def push_rate(self, transport: str) -> float:
        started, ended = self.push(transport)
        return self.num_bytes / (ended - started) / 1e9

    def open_raw(self) -> None:
        unique_id = self.publisher.call("unique_id")
        ranks = [self.publisher, *self.members]
        for rank, child in enumerate(ranks):
            child.ask("open_raw", unique_id, rank, len(ranks), self.num_bytes)
        for child in ranks:
            child.answer("open_raw")

    def raw_rate(self) -> float:
        ranks = [*self.members, self.publisher]
        for child in ranks:
            child.ask("broadcast_raw")
        times = [child.answer("broadcast_raw") for child in ranks]
        return float(self.num_bytes / (max(ended for _, ended in times) - times[-1][0]) / 1e9)

    def close_raw(self) -> None:
        ranks = [self.publisher, *self.members]
        for child in ranks:
            child.ask("close_raw")
        for child in ranks:
            child.answer("close_raw")

    def stop(self) -> None:
        for child in [self.publisher, *self.members]:
            child.stop()


def bench_ranks(gigabytes: float) -> Results:
    """Push to three members against a raw broadcast among the same ranks, then recoveries."""
    results = Results()
    ranks = Ranks(NUM_MEMBERS, gigabytes, "device")
    try:
        size = f"{gigabytes:g} GB to {NUM_MEMBERS} members"
        started, ended = ranks.push("nccl")
        results.add(f"first push with its group, {size}", "s", ended - started)
        ranks.open_raw()
        contenders = {f"push, {size}": lambda: ranks.push_rate("nccl"), f"raw broadcast, {size}": ranks.raw_rate}
        ours, limit = alternate(contenders, NUM_ROUNDS, "GB/s").values()
        for measurement in (ours, limit):
            results.add(measurement.name, "GB/s", *measurement.rates)
        results.bar(f"push / raw broadcast, {size}", median_ratio(ours, limit), 0.85)
        save(results)
        ranks.close_raw()
        for fault, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            recovery_s = _recovery(ranks, number)
            results.add(f"recovery from a {fault} member, deadline {FAULT_DEADLINE_S:g} s", "s", recovery_s)
            goal = FAULT_DEADLINE_S + RECOVERY_S
            results.bar(f"recovery from a {fault} member, deadline {FAULT_DEADLINE_S:g} s", recovery_s, goal, True)
            save(results)
    finally:
        ranks.stop()
    return results


def _recovery(ranks: Ranks, fault: signal.Signals) -> float:
    """Seconds from a fault in the middle of a push to the end of a push to the members that are left."""
    victim, *others = ranks.members
    started = ranks.begin("nccl", ranks.members, FAULT_DEADLINE_S)
    time.sleep(max(0.0, started + 0.2 - time.monotonic()))
    broke_at = time.monotonic()
    os.kill(victim.pid, fault)
    failure = ranks.publisher.call("end_send")
    say(f"the push failed after {time.monotonic() - broke_at:.1f} s: {failure}")
    assert failure, "the push ended before the fault; make it larger"
    for child in others:
        child.ask("abort")
    for child in others:
        child.answer("abort")
    _, ended = ranks.push("nccl", others)
    ranks.members = others
    victim.stop()
    return ended - broke_at


def bench_host(gigabytes: list[float]) -> Results:
    """nccl against gloo, to one member, when the publisher stages in host memory."""
    results = Results()
    for size in gigabytes:
        ranks = Ranks(1, size, "host")
        try:
            rates: dict[str, list[float]] = {"nccl": [], "gloo": []}
            for transport, found in rates.items():
                ranks.push_rate(transport)  # allocates the buffers
                found += [ranks.push_rate(transport) for _ in range(3 if size < 2 else 1)]
                results.add(f"{transport} from host memory, {size:g} GB", "GB/s", *found)
                save(results)
                ranks.members[0].call("forget")
            results.add(f"nccl / gloo from host memory, {size:g} GB", "ratio", max(rates["nccl"]) / max(rates["gloo"]))
        finally:
            ranks.stop()
    return results
