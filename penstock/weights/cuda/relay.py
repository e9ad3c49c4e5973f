"""Broadcast from or to host memory by way of two GPU buffers: one is copied while the other is broadcast."""

from __future__ import annotations

from penstock.weights.cuda.nccl_group import NcclGroup
from penstock.weights.cuda.stream import DeviceAllocation
from penstock.weights.deadline import Deadline

NUM_SLOTS = 2


class Relay:
    """Lives as long as its group. Before each bucket the caller must wait for the one that came NUM_SLOTS earlier."""

    def __init__(self, group: NcclGroup, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._group = group
        self._slots = [DeviceAllocation(max_bytes, group.device_index) for _ in range(NUM_SLOTS)]
        self._num_used = 0

    def send(self, pointer: int, num_bytes: int, deadline: Deadline) -> int:
        """Copy to the GPU, then enqueue the broadcast. Returns its event. Earlier broadcasts run meanwhile."""
        slot = self._next_slot()
        self._group.wait(self._group.copy(slot.pointer, pointer, num_bytes), deadline)
        return self._group.broadcast(slot.pointer, num_bytes, deadline, hold=slot)

    def receive(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object) -> tuple[int, int]:
        """Enqueue the broadcast, then the copy to pinned memory that `hold` owns. Returns their events, for `wait`."""
        slot = self._next_slot()
        arrived = self._group.broadcast(slot.pointer, num_bytes, deadline, hold=(slot, hold))
        return arrived, self._group.copy(pointer, slot.pointer, num_bytes, after=arrived)

    def wait(self, received: tuple[int, int], deadline: Deadline) -> None:
        arrived, copied = received
        self._group.wait(copied, deadline)
        self._group.wait(arrived, deadline)

    def _next_slot(self) -> DeviceAllocation:
        slot = self._slots[self._num_used % NUM_SLOTS]
        self._num_used += 1
        return slot
