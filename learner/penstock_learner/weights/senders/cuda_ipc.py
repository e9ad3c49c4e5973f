"""cuda_ipc: members on the publisher's GPU map its buckets and copy them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda.ipc import IpcOffer, export_handle
from penstock.weights.cuda.stream import DeviceStream
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import wire_sizes
from penstock_learner.weights.memory import DeviceBuckets, device_index, device_uuid
from penstock_learner.weights.push import PushTarget
from penstock_learner.weights.senders.sender import Shipment


class CudaIpcSender:
    """The rendezvous is an IpcOffer. Members copy a bucket when the header in the memory says that it is ready.

    Deltas, and buckets that are not staged on the GPU, are first copied to GPU memory of this sender. That memory is
    kept from push to push, because freeing it would wait for everything that runs on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: DeviceBuckets | None = None
        self._own: DeviceBuckets | None = None
        self._is_ready = False
        """Every bucket was ready when the version was offered."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        staged = shipment.staged.memory
        try:
            if isinstance(staged, DeviceBuckets) and not shipment.deltas:
                self._memory = staged
            else:
                self._memory = self._own_memory(wire_sizes(shipment.manifest))
            self._is_ready = self._memory is staged and shipment.staged.is_sealed
            num_ready = len(staged.buckets) if self._is_ready else 0
            handle, uuid = export_handle(self._memory.allocation.pointer), device_uuid(self._memory.device)
            return IpcOffer(handle.hex(), uuid, self._memory.offsets[-1], num_ready).to_json()
        except RuntimeError as error:
            first_line = first_line_of(error)
            raise WeightPushFailed(f"GPU memory cannot be offered by cuda_ipc: {first_line}") from error

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Return when every bucket is ready. The members copy without further help, and are done when they commit."""
        memory = self._memory
        assert memory is not None, "send follows open"
        if self._is_ready:
            return
        is_own = memory is self._own
        with closing(DeviceStream(device_index(memory.device))) as stream:
            for index, wire in enumerate(shipment.wires(deadline)):
                if is_own:
                    stream.copy(memory.buckets[index].data_ptr(), wire.data_ptr(), wire.numel())
                    stream.wait(stream.record(), deadline)
                is_last = index + 1 == len(shipment.manifest.buckets)
                if is_last or not shipment.staged.is_complete:
                    memory.mark_ready(shipment.manifest, index + 1)

    def close(self, *, failed: bool) -> None:
        self._memory = None

    def _own_memory(self, sizes: list[int]) -> DeviceBuckets:
        if self._own is not None and self._own.sizes == sizes:
            self._own.clear()
        else:
            self._own = None  # free the old memory first
            self._own = DeviceBuckets(sizes, self._device)
        return self._own
