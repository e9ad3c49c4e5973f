"""Where the publisher's buckets lie. Every sender reads any of them; some senders want one of their own.

| memory | for                | a member                                                        |
|--------|--------------------|-----------------------------------------------------------------|
| host   | gloo, snapshot     | gets a copy over the network or a file                          |
| shared | shm, and all of host's | maps the pages; they are sealed, so nobody can change them  |
| device | nccl, cuda_ipc     | gets a copy from GPU to GPU                                     |
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from penstock.v1 import weights_pb2
from penstock.weights.shared_memory import SEALS, bucket_offsets, header_bytes, make_header

MemoryKind = Literal["host", "shared", "device"]


class BucketMemory(Protocol):
    """The buckets of one version. `seal` is called once, when every byte is in and hashed."""

    kind: MemoryKind
    buckets: list[torch.Tensor]

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None: ...


class HostMemory:
    """Plain host memory; pinned where a GPU copies to and from it."""

    kind: MemoryKind = "host"

    def __init__(self, sizes: Sequence[int]) -> None:
        pin = torch.cuda.is_available()
        self.buckets = [torch.zeros(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        pass


class SharedMemory:
    """One anonymous file in memory, mapped by members of the same host through `path`.

    Made anew for every version and never written again after `seal`, which the kernel enforces on everyone else: a
    member that slept through an eviction can still only ever see this version's bytes. Pages live until the last
    mapping goes, the publisher's death included."""

    kind: MemoryKind = "shared"

    def __init__(self, sizes: Sequence[int]) -> None:
        offsets = bucket_offsets(sizes)
        self._header_at = offsets[-1]
        self._fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        num_bytes = self._header_at + header_bytes(len(sizes))
        os.ftruncate(self._fd, num_bytes)
        mapping = mmap.mmap(self._fd, num_bytes)
        self.buckets = [
            torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
            for offset, size in zip(offsets, sizes, strict=False)
        ]

    @property
    def path(self) -> str:
        """Readable by processes of the same user and pid namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        os.pwrite(self._fd, make_header(manifest, checksums), self._header_at)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)

    def __del__(self) -> None:
        os.close(self._fd)


def make_memory(kind: MemoryKind, sizes: Sequence[int], device: torch.device) -> BucketMemory:
    if kind == "device":
        from penstock_learner.weights.device_memory import DeviceMemory

        return DeviceMemory(sizes, device)
    return SharedMemory(sizes) if kind == "shared" else HostMemory(sizes)
