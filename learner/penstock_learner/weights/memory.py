"""Where the publisher's buckets lie. Every sender reads any of them; some senders want one of their own.

| memory | for                    | a member                                                          |
|--------|------------------------|-------------------------------------------------------------------|
| host   | gloo, snapshot         | gets a copy over the network or a file                            |
| shared | shm, and all of host's | maps the pages, which the kernel lets nobody but the publisher write |
| device | nccl, cuda_ipc         | gets a copy from GPU to GPU                                       |

Memory is used again for a later version: touching new pages costs several times what copying into old ones does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from penstock.v1 import weights_pb2
from penstock.weights.manifest import bucket_offsets
from penstock.weights.shared_memory import SEALS, header_bytes, make_header

MemoryKind = Literal["host", "shared", "device"]


class BucketMemory(Protocol):
    """The buckets of one version at a time."""

    kind: MemoryKind
    sizes: list[int]
    buckets: list[torch.Tensor]
    is_reusable: bool
    """False once a member that may still read the bytes has fallen silent: it must never see another version's."""

    def clear(self) -> None:
        """Called before the first byte of a version."""
        ...

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        """Called once every byte is in and hashed."""
        ...


class HostMemory:
    """Plain host memory; pinned where a GPU copies to and from it."""

    kind: MemoryKind = "host"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.buckets = [torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for size in sizes]
        self.is_reusable = True

    def clear(self) -> None:
        pass

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        pass


class SharedMemory:
    """One anonymous file in memory, mapped by members of the same host through `path`.

    Sealed against writing by anyone but this object. Its header names a version exactly while the buckets hold that
    version whole. Pages live until the last mapping goes, the publisher's death included."""

    kind: MemoryKind = "shared"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.is_reusable = True
        offsets = bucket_offsets(sizes, mmap.PAGESIZE)
        self._header = slice(offsets[-1], offsets[-1] + header_bytes(len(sizes)))
        self._fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self._header.stop)
        self._mapping = mmap.mmap(self._fd, self._header.stop)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        self.buckets = [
            torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=offset)
            for offset, size in zip(offsets, sizes, strict=False)
        ]

    @property
    def path(self) -> str:
        """Readable by processes of the same user and pid namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        self._write_header(b"")

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self._write_header(make_header(manifest, checksums))

    def _write_header(self, header: bytes) -> None:
        num_bytes = self._header.stop - self._header.start
        self._mapping[self._header] = header.ljust(num_bytes, b"\0")

    def __del__(self) -> None:
        os.close(self._fd)


class MemoryPool:
    """Memory of versions that are no longer needed, for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[BucketMemory] = []

    def take(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        """Cleared memory of this layout; what is free and does not fit is let go."""
        fitting = [memory for memory in self._free if memory.kind == kind and memory.sizes == list(sizes)]
        self._free = fitting[1:]
        memory = fitting[0] if fitting else self._make(kind, sizes)
        memory.clear()
        return memory

    def give_back(self, memory: BucketMemory) -> None:
        if memory.is_reusable:
            self._free.append(memory)

    def _make(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        if kind == "device":
            from penstock_learner.weights.device_memory import DeviceMemory

            return DeviceMemory(sizes, self.device)
        return SharedMemory(sizes) if kind == "shared" else HostMemory(sizes)
