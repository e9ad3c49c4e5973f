"""cuda_ipc: members on the publisher's GPU map its buckets and copy them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

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
    """The rendezvous is an IpcOffer. Members copy each bucket once the header in the memory says that it is ready: all
    of a version that is staged there whole, when it is offered.

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
            self._is_ready = self._memory is staged and shipment.staged.complete.is_set()
            num_ready = len(staged.buckets) if self._is_ready else 0
            if num_ready:
                with closing(DeviceStream(device_index(self._memory.device))) as stream:
                    _write_header(stream, self._memory, shipment, num_ready)
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
                    _write_header(stream, memory, shipment, index + 1)

    def close(self, *, failed: bool) -> None:
        self._memory = None


def _write_header(stream: DeviceStream, memory: DeviceMemory, shipment: Shipment, num_ready: int) -> None:
    header = np.frombuffer(HEADER.pack(identity(shipment.manifest), num_ready), dtype=np.uint8)
    stream.copy(memory.header_pointer, header.ctypes.data, HEADER.size)
    stream.synchronize()
