"""Buckets in GPU memory that other processes on the same GPU can map."""

from __future__ import annotations

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


class DeviceMemory:
    """One allocation with the layout of penstock/weights/cuda/ipc.py: the buckets, then the header of cuda_ipc.

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
