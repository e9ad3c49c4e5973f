"""The interface of a receiver: its input, and the buckets that it yields as they arrive. Also two small receivers.

A receiver knows nothing about engines. Each of its waits has a deadline and ends early when the stage is aborted. So if
a publisher stalls or never connects, it costs no more than a waiting thread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import bucket_offsets, wire_sizes
from penstock.weights.snapshot import read_snapshot
from penstock.weights.transports import SEALS, TRANSPORTS, header_bytes, read_header


@dataclass(frozen=True)
class Reception:
    """One transfer, as one worker of a member sees it."""

    announcement: weights_pb2.AnnounceRequest
    device: torch.device
    """Where to put the buckets: the engine's GPU if a second set of weights fits there, else host memory."""
    deadline: Deadline
    worker: int = 0
    """Index of this worker within the member."""
    spare: list[torch.Tensor] = field(default_factory=list)
    """Buffers of an earlier version. Filling them again is faster than using new memory."""
    worker_device: torch.device = torch.device("cpu")
    """Where the engine keeps its weights. The receiving thread uses this device, with a separate stream."""

    @property
    def manifest(self) -> weights_pb2.WeightManifest:
        return self.announcement.manifest

    @property
    def rendezvous(self) -> str:
        """How to find the publisher. The sender of the same transport documents the format."""
        return self.announcement.rendezvous

    @property
    def rank(self) -> int:
        """Rank of this worker in the transfer; the publisher is rank 0."""
        return self.announcement.rank + self.worker

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised bucket. Host memory is pinned if there is a GPU to copy from or to."""
        for index, tensor in enumerate(self.spare):
            if tensor.numel() == num_bytes and tensor.device == device:
                return self.spare.pop(index)
        pin = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


@dataclass(frozen=True)
class Arrived:
    """The bytes of one bucket, as they were sent."""

    wire: torch.Tensor
    """Flat uint8 of the size that the manifest gives for the transfer, on `Reception.device` or in host memory."""
    checksum: str = ""
    """Checksum of the bytes, if the receiver knows it: it hashed them on arrival, or the publisher's header has it."""
    is_shared: bool = False
    """The bytes are the publisher's own sealed pages. They need no second hash, and cannot be reused as a buffer."""


Receiver = Callable[[Reception], Iterator[Arrived]]
"""Yields the buckets in the manifest's order."""


def find_receiver(transport: str) -> Receiver:
    """Return the receiver of a transport. One with dependencies is `receive` of a module, imported here."""
    if transport not in TRANSPORTS:
        raise WeightPushFailed(f"unknown transport {transport!r}; this server knows {', '.join(TRANSPORTS)}")
    if transport in _LIGHT_RECEIVERS:
        return _LIGHT_RECEIVERS[transport]
    receiver: Receiver = import_module(f"penstock_rollout.weights.receivers.{transport}").receive
    return receiver


@cache
def device_uuid(device: torch.device) -> str:
    """Return the name by which publisher and servers refer to a worker's device: `cpu`, or the UUID of the GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def receive_by_shm(reception: Reception) -> Iterator[Arrived]:
    """shm: map the publisher's buckets. Nothing is copied, and the pages outlive the publisher.

    The rendezvous is a path under /proc."""
    sizes = wire_sizes(reception.manifest)
    offsets = bucket_offsets(sizes, mmap.PAGESIZE)
    path = Path(reception.rendezvous)
    if not str(path.absolute()).startswith("/proc/"):
        raise WeightPushFailed(f"{path} is not a path under /proc")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightPushFailed(
            f"{path} cannot be opened ({error.strerror}); shm needs the same host, user and pid namespace; or use gloo"
        ) from error
    try:
        _check_sealed(fd)
        num_bytes = offsets[-1] + header_bytes(len(sizes))
        if os.fstat(fd).st_size != num_bytes:
            raise WeightPushFailed(f"{reception.rendezvous} is not {num_bytes} bytes long, as the manifest requires")
        # Wait until the header says that the memory holds all of the announced version.
        size = header_bytes(len(sizes))
        while (checksums := read_header(os.pread(fd, size, offsets[-1]), reception.manifest)) is None:
            reception.deadline.sleep()
        # The mapping is private: if this process wrote to it by mistake, only its own copy would change.
        mapping = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for offset, size, checksum in zip(offsets, sizes, checksums, strict=False):
        yield Arrived(torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset), checksum, True)


def _check_sealed(fd: int) -> None:
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        is_sealed = False
    if not is_sealed:
        raise WeightPushFailed("the publisher's shared memory is not sealed, so other processes could change it")


def receive_by_snapshot(reception: Reception) -> Iterator[Arrived]:
    """snapshot: read the buckets from a safetensors file on a shared volume. The rendezvous is its folder."""
    folder = Path(reception.rendezvous)
    try:
        for bucket in read_snapshot(folder, reception.manifest):
            reception.deadline.check()
            yield Arrived(torch.from_numpy(bucket))
    except OSError as error:
        raise WeightPushFailed(f"reading the snapshot in {folder} failed: {error.strerror or error}") from error


_LIGHT_RECEIVERS: dict[str, Receiver] = {"shm": receive_by_shm, "snapshot": receive_by_snapshot}
