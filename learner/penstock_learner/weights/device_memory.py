"""Buckets in GPU memory of their own, which other processes on the GPU can map."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from penstock.v1 import weights_pb2
from penstock.weights.cuda.ipc import BUCKET_ALIGNMENT, HEADER, identity
from penstock.weights.cuda.stream import DeviceAllocation, DeviceStream
from penstock.weights.manifest import bucket_offsets
from penstock_learner.weights.memory import MemoryKind

MAX_SPARES = 2


class DeviceMemory:
    """One allocation, laid out as penstock/weights/cuda/ipc.py says: buckets, then the header of cuda_ipc."""

    kind: MemoryKind = "device"

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.device = torch.device(device.type, device_index(device))
        self.sizes = list(sizes)
        self.is_reusable = True
        self.offsets = bucket_offsets(sizes, BUCKET_ALIGNMENT)
        self.allocation = _spares.take(self.offsets[-1] + HEADER.size, device_index(device))
        self.buckets = [
            bytes_at(self.allocation.pointer + offset, size, self.device)
            for offset, size in zip(self.offsets, sizes, strict=False)
        ]

    def clear(self) -> None:
        """No bucket is ready: a member that still looks must not take the new bytes for the old version's."""
        self.allocation.clear()

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self.mark_ready(manifest, len(self.buckets))

    def mark_ready(self, manifest: weights_pb2.WeightManifest, num_ready: int) -> None:
        """Members may copy the first buckets: they are the manifest's."""
        header = np.frombuffer(HEADER.pack(identity(manifest), num_ready), dtype=np.uint8)
        with closing(DeviceStream(self.allocation.device_index)) as stream:
            stream.copy(self.allocation.pointer + self.offsets[-1], header.ctypes.data, HEADER.size)
            stream.synchronize()

    def __del__(self) -> None:
        # Tensors of buckets that outlive this object would see the next version: nobody keeps one beyond its push.
        if hasattr(self, "allocation") and not sys.is_finalizing():
            _spares.give_back(self.allocation)


class _Spares:
    """Allocations of versions that are gone, for the next of the same size: freeing GPU memory waits for everything
    that runs on the GPU, a transfer that hangs included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocations: list[DeviceAllocation] = []

    def take(self, num_bytes: int, index: int) -> DeviceAllocation:
        """Zeroed."""
        with self._lock:
            for spare in self._allocations:
                if (spare.num_bytes, spare.device_index) == (num_bytes, index):
                    self._allocations.remove(spare)
                    break
            else:
                # What no longer fits is in the way of what comes: the sizes of a model do not change back.
                self._allocations = [spare for spare in self._allocations if spare.device_index != index]
                return DeviceAllocation(num_bytes, index)
        spare.clear()
        return spare

    def give_back(self, allocation: DeviceAllocation) -> None:
        with self._lock:
            self._allocations = [*self._allocations, allocation][-MAX_SPARES:]


_spares = _Spares()


def device_index(device: torch.device) -> int:
    return device.index if device.index is not None else 0


def device_uuid(device: torch.device) -> str:
    """`cpu`, or the UUID of a GPU, as rollout servers name their devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def bytes_at(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A view of GPU memory that something else owns."""
    return torch.as_tensor(_Bytes(pointer, num_bytes), device=device)


class _Bytes:
    """The CUDA array interface, by which torch takes in memory of others."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }
