"""The memory of the publisher's buckets. Every sender can read every kind, except that shm needs shared memory.

| memory | transports                | what a member gets                                                |
|--------|---------------------------|-------------------------------------------------------------------|
| host   | nccl, gloo, snapshot      | a copy, over the network or from a file                           |
| shared | nccl, shm, gloo, snapshot | with shm, the pages themselves; only the publisher can write them |
| device | nccl, cuda_ipc            | a copy from GPU to GPU                                            |

DeviceMemory is in device_memory.py. memory_pool.py reuses memory for later versions.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from penstock.errors import first_line_of
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.manifest import bucket_offsets
from penstock.weights.shared_memory import SEALS, header_bytes, make_header
from penstock.weights.transports import has_cupy

logger = logging.getLogger(__name__)
MemoryKind = Literal["host", "shared", "device"]


class BucketMemory(Protocol):
    """Holds the buckets of one version at a time."""

    kind: MemoryKind
    sizes: list[int]
    buckets: list[torch.Tensor]
    is_reusable: bool
    """False if a member may still be reading the buckets. Their bytes must then not change."""

    def clear(self) -> None:
        """Called before the first byte of a version is written."""
        ...

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        """Called when every byte is written and hashed."""
        ...


class HostMemory:
    """Plain host memory, pinned if there is a GPU."""

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
    """One anonymous file in memory, which members on the same host map by its `path`.

    Kernel seals prevent every other process from writing to it. The header names a version only while the buckets hold
    all of it. The pages live until the last mapping is gone, even if the publisher has died. If there is a GPU, the
    pages are pinned, because nccl copies from them too."""

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
        self._pinned = pin(self.buckets[0].data_ptr(), offsets[-1]) if self.buckets else 0

    @property
    def path(self) -> str:
        """A path that processes of the same user and pid namespace can open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        self._write_header(b"")

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self._write_header(make_header(manifest, checksums))

    def _write_header(self, header: bytes) -> None:
        num_bytes = self._header.stop - self._header.start
        self._mapping[self._header] = header.ljust(num_bytes, b"\0")

    def __del__(self) -> None:
        if getattr(self, "_pinned", 0) and not sys.is_finalizing():
            libraries.runtime().hostUnregister(self._pinned)
        os.close(self._fd)


def pin(pointer: int, num_bytes: int) -> int:
    """Pin pages, so that a GPU copies from them at full speed. Returns the pointer, or 0 if they stay as they are."""
    if not (has_cupy() and torch.cuda.is_available()):
        return 0
    try:
        libraries.runtime().hostRegister(pointer, num_bytes, 0)
    except RuntimeError as error:
        logger.warning("the buckets stay unpinned, so nccl copies them more slowly: %s", first_line_of(error))
        return 0
    return pointer
