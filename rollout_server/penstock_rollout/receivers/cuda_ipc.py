"""cuda_ipc: map the publisher's buckets, which lie on this worker's GPU, and copy them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from penstock.errors import WeightPushFailed
from penstock.weights.cuda.ipc import HEADER, IpcOffer, bucket_offsets, identity, opened
from penstock.weights.cuda.stream import DeviceStream
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import Patience
from penstock_rollout.receivers.reception import Arrived, Reception

READY_POLL_S = 0.0005
MAX_ENQUEUED = 64


def receive(reception: Reception) -> Iterator[Arrived]:
    """Copies of the buckets, on the GPU or in pinned host memory. The rendezvous is an IpcOffer."""
    offer = IpcOffer.from_json(reception.rendezvous)
    sizes = wire_sizes(reception.manifest)
    here = device_uuid(reception.worker_device)
    if offer.device != here:
        raise WeightPushFailed(
            f"the publisher is on GPU {offer.device}, this worker on {here}; cuda_ipc needs both on one, use nccl"
        )
    if offer.offsets != bucket_offsets(sizes):
        raise WeightPushFailed("the publisher's GPU memory is not laid out as the manifest says")
    index = reception.worker_device.index or 0
    try:
        with opened(bytes.fromhex(offer.handle), index) as pointer:
            yield from _copies(pointer, offer.offsets, sizes, reception, index)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise WeightPushFailed(f"copying the publisher's GPU memory failed: {first_line}") from error


def _copies(
    pointer: int, offsets: list[int], sizes: list[int], reception: Reception, device_index: int
) -> Iterator[Arrived]:
    stream = DeviceStream(device_index)
    ready = _ReadyBuckets(stream, pointer + offsets[-1], identity(reception.manifest))
    enqueued: deque[tuple[torch.Tensor, int]] = deque()
    try:
        for bucket, (offset, num_bytes) in enumerate(zip(offsets, sizes, strict=False)):
            while enqueued and (len(enqueued) >= MAX_ENQUEUED or not ready.has(bucket)):
                yield _oldest(stream, enqueued, reception.patience)
            ready.wait(bucket, reception.patience)
            wire = reception.buffer(num_bytes, reception.device)
            stream.copy(wire.data_ptr(), pointer + offset, num_bytes)
            enqueued.append((wire, stream.record()))
        while enqueued:
            yield _oldest(stream, enqueued, reception.patience)
    finally:
        stream.synchronize()  # copies wait for nobody, and both ends must stay until they are done
        stream.close()


def _oldest(stream: DeviceStream, enqueued: deque[tuple[torch.Tensor, int]], patience: Patience) -> Arrived:
    wire, event = enqueued.popleft()
    stream.wait(event, patience)
    return Arrived(wire)


class _ReadyBuckets:
    """The header in the publisher's memory, read anew when it did not yet say enough. A read waits for copies that are
    enqueued before it, and these for nobody."""

    def __init__(self, stream: DeviceStream, pointer: int, expected: bytes) -> None:
        self._stream = stream
        self._pointer = pointer
        self._expected = expected
        self._header = np.zeros(HEADER.size, dtype=np.uint8)
        self._num_ready = 0

    def has(self, bucket: int) -> bool:
        if self._num_ready <= bucket:
            self._read()
        return self._num_ready > bucket

    def wait(self, bucket: int, patience: Patience) -> None:
        patience.until(lambda: self.has(bucket), READY_POLL_S)

    def _read(self) -> None:
        self._stream.copy(self._header.ctypes.data, self._pointer, HEADER.size)
        self._stream.synchronize()
        found, num_ready = HEADER.unpack(self._header.tobytes())
        # No bucket is ready in memory that is still another version's, or nobody's.
        self._num_ready = num_ready if found == self._expected else 0


def device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
