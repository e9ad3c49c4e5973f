"""The memory of versions that are no longer needed, kept for the next versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock_learner.weights.device_memory import DeviceMemory
from penstock_learner.weights.memory import BucketMemory, HostMemory, MemoryKind, SharedMemory


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
            return DeviceMemory(sizes, self.device)
        return SharedMemory(sizes) if kind == "shared" else HostMemory(sizes)
