"""cuda_ipc: members on the publisher's GPU map its buckets and copy them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.errors import WeightPushFailed
from penstock.weights.cuda.ipc import HEADER, IpcOffer, export_handle, identity
from penstock.weights.cuda.stream import DeviceStream
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import Patience
from penstock_learner.weights.device_memory import DeviceMemory, device_index, device_uuid
from penstock_learner.weights.senders.sender import PushTarget, Shipment


class CudaIpcSender:
    """The rendezvous is an IpcOffer. Members copy each bucket once the header in the memory says that it is ready.

    What is not staged on the GPU, and deltas, are first copied to GPU memory of the push's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: DeviceMemory | None = None

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        staged = shipment.staged.memory
        try:
            if isinstance(staged, DeviceMemory) and not shipment.deltas:
                self._memory = staged
            else:
                self._memory = DeviceMemory(wire_sizes(shipment.manifest), self._device)
            handle = export_handle(self._memory.allocation.pointer)
            return IpcOffer(handle.hex(), device_uuid(self._memory.device), self._memory.offsets).to_json()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise WeightPushFailed(f"GPU memory cannot be offered by cuda_ipc: {first_line}") from error

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        """Returns when every bucket is ready. The members copy on their own, and are done when they commit."""
        memory = self._memory
        assert memory is not None, "send follows open"
        is_own = memory is not shipment.staged.memory
        stream = DeviceStream(device_index(memory.device))
        try:
            for index, wire in enumerate(shipment.wires(patience)):
                if is_own:
                    stream.copy(memory.buckets[index].data_ptr(), wire.data_ptr(), wire.numel())
                    stream.wait(stream.record(), patience)
                is_last = index + 1 == len(shipment.manifest.buckets)
                if is_last or not shipment.staged.complete.is_set():
                    _write_header(stream, memory, identity(shipment.manifest), index + 1)
        finally:
            stream.close()

    def close(self, *, failed: bool) -> None:
        self._memory = None


def _write_header(stream: DeviceStream, memory: DeviceMemory, name: bytes, num_ready: int) -> None:
    header = np.frombuffer(HEADER.pack(name, num_ready), dtype=np.uint8)
    stream.copy(memory.header_pointer, header.ctypes.data, HEADER.size)
    stream.synchronize()
