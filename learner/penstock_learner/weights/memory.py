"""The memory of the publisher's buckets. Every sender can read every kind, except that shm needs shared memory.

| memory | transports                | what a member gets                                                |
|--------|---------------------------|-------------------------------------------------------------------|
| host   | nccl, gloo, snapshot      | a copy, over the network or from a file                           |
| shared | nccl, shm, gloo, snapshot | with shm, the pages themselves; only the publisher can write them |
| device | nccl, cuda_ipc            | a copy from GPU to GPU                                            |

MemoryPool reuses the memory of versions that are no longer needed.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, Protocol

import numpy as np
import torch

from penstock.errors import first_line_of
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.cuda.ipc import BUCKET_ALIGNMENT, HEADER, identity
from penstock.weights.cuda.stream import DeviceAllocation, DeviceStream
from penstock.weights.manifest import bucket_offsets
from penstock.weights.transports import SEALS, has_cupy, header_bytes, make_header

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


class HostBuckets:
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


class SharedBuckets:
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


class DeviceBuckets:
    """Buckets in GPU memory that other processes on the same GPU can map.

    It is one allocation with the layout of penstock/weights/cuda/ipc.py: the buckets, then the header of cuda_ipc.

    The buckets are views, so they must not outlive this object."""

    kind: MemoryKind = "device"

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.device = torch.device(device.type, device_index(device))
        self.sizes = list(sizes)
        self.is_reusable = True
        self.offsets = bucket_offsets(sizes, BUCKET_ALIGNMENT)
        self.allocation = DeviceAllocation(self.offsets[-1] + HEADER.size, device_index(device))
        self.buckets = [
            bytes_at(self.allocation.pointer + offset, size, self.device)
            for offset, size in zip(self.offsets, sizes, strict=False)
        ]

    def clear(self) -> None:
        """Zero everything. A member that still reads the header must not take the new bytes for the old version's."""
        self.allocation.clear()

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self.mark_ready(manifest, len(self.buckets))

    def mark_ready(self, manifest: weights_pb2.WeightManifest, num_ready: int) -> None:
        """Tell members that the first `num_ready` buckets hold the manifest's version and may be copied."""
        header = np.frombuffer(HEADER.pack(identity(manifest), num_ready), dtype=np.uint8)
        with closing(DeviceStream(self.allocation.device_index)) as stream:
            stream.copy(self.allocation.pointer + self.offsets[-1], header.ctypes.data, HEADER.size)
            stream.synchronize()


def device_index(device: torch.device) -> int:
    return device.index if device.index is not None else 0


def device_uuid(device: torch.device) -> str:
    """Return `cpu`, or the UUID of the GPU. Rollout servers name their devices in the same way."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def bytes_at(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a view of GPU memory. The tensor does not own the memory."""
    return torch.as_tensor(_Bytes(pointer, num_bytes), device=device)


class _Bytes:
    """The CUDA array interface, by which torch wraps memory that it did not allocate."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


class MemoryPool:
    """Reuses bucket memory from version to version, so the publisher's memory stays the same over many pushes.

    Copying into pages that were used before is several times faster than copying into new ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[BucketMemory] = []

    def take(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        """Return cleared memory with this layout. Free memory with another layout is released."""
        fitting = [memory for memory in self._free if memory.kind == kind and memory.sizes == list(sizes)]
        self._free = fitting[1:]
        memory = fitting[0] if fitting else self._make(kind, sizes)
        memory.clear()
        return memory

    def give_back(self, memory: BucketMemory) -> None:
        """Keep the memory for a later version, unless a member may still read it.

        GPU memory is always kept. Members copy it and verify the copy, so they notice if it is overwritten. Freeing it
        would wait for everything that runs on the GPU, including a transfer that hangs."""
        if memory.is_reusable or memory.kind == "device":
            self._free.append(memory)

    def _make(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        if kind == "device":
            return DeviceBuckets(sizes, self.device)
        return SharedBuckets(sizes) if kind == "shared" else HostBuckets(sizes)
