"""cuda_ipc: members on the publisher's GPU map its buckets and copy them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from penstock.errors import WeightPushFailed
from penstock.weights.cuda.ipc import IpcOffer, export_handle
from penstock.weights.cuda.stream import DeviceStream
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import Patience
from penstock_learner.weights.device_memory import DeviceMemory, device_index, device_uuid
from penstock_learner.weights.senders.sender import PushTarget, Shipment


class CudaIpcSender:
    """The rendezvous is an IpcOffer. Members copy each bucket once the header in the memory says that it is ready; a
    version that is staged there whole says so of all.

    What is not staged on the GPU, and deltas, are first copied to GPU memory of the push's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: DeviceMemory | None = None
        self._is_ready = False
        """Every bucket was when the version was offered."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        staged = shipment.staged.memory
        try:
            if isinstance(staged, DeviceMemory) and not shipment.deltas:
                self._memory = staged
            else:
                self._memory = DeviceMemory(wire_sizes(shipment.manifest), self._device)
            self._is_ready = self._memory is staged and shipment.staged.sealed.is_set()
            num_ready = len(staged.buckets) if self._is_ready else 0
            handle, uuid = export_handle(self._memory.allocation.pointer), device_uuid(self._memory.device)
            return IpcOffer(handle.hex(), uuid, self._memory.offsets[-1], num_ready).to_json()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise WeightPushFailed(f"GPU memory cannot be offered by cuda_ipc: {first_line}") from error

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        """Returns when every bucket is ready. The members copy on their own, and are done when they commit."""
        memory = self._memory
        assert memory is not None, "send follows open"
        if self._is_ready:
            return
        is_own = memory is not shipment.staged.memory
        with closing(DeviceStream(device_index(memory.device))) as stream:
            for index, wire in enumerate(shipment.wires(patience)):
                if is_own:
                    stream.copy(memory.buckets[index].data_ptr(), wire.data_ptr(), wire.numel())
                    stream.wait(stream.record(), patience)
                is_last = index + 1 == len(shipment.manifest.buckets)
                if is_last or not shipment.staged.complete.is_set():
                    memory.mark_ready(shipment.manifest, index + 1)

    def close(self, *, failed: bool) -> None:
        self._memory = None
