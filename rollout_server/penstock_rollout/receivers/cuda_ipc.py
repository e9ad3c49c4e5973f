"""cuda_ipc: map the publisher's buckets, which lie on this worker's GPU, and copy them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from penstock.errors import WeightPushFailed
from penstock.weights.cuda.ipc import HEADER, IpcOffer, Mappings, bucket_offsets, identity
from penstock.weights.cuda.stream import DeviceStream
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import Patience
from penstock_rollout.receivers.device_name import device_uuid
from penstock_rollout.receivers.reception import Arrived, Reception

READY_POLL_S = 0.0005

mappings = Mappings()
"""Of this process."""


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
        with mappings.opened(bytes.fromhex(offer.handle), index, reception.manifest.term) as pointer:
            yield from _copies(pointer, offer.offsets, sizes, reception, index)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise WeightPushFailed(f"copying the publisher's GPU memory failed: {first_line}") from error


def _copies(
    pointer: int, offsets: list[int], sizes: list[int], reception: Reception, device_index: int
) -> Iterator[Arrived]:
    """All buckets that are ready are copied as one; then all that are by then. They lie here as they lie there."""
    stream = _copy_stream(device_index)
    ready = _ReadyBuckets(stream, pointer + offsets[-1], identity(reception.manifest))
    reception.spare.clear()  # torch keeps what is given back, and gives it out again
    memory = reception.buffer(offsets[-1], reception.device)
    done = 0
    try:
        while done < len(sizes):
            ready.wait(done, reception.patience)
            start, end = offsets[done], offsets[ready.num_ready]
            stream.copy(memory.data_ptr() + start, pointer + start, end - start)
            copied = stream.record()
            arrived = [
                Arrived(memory[offsets[bucket] : offsets[bucket] + sizes[bucket]])
                for bucket in range(done, ready.num_ready)
            ]
            stream.wait(copied, reception.patience)
            yield from arrived
            done += len(arrived)
    finally:
        stream.synchronize()  # copies wait for nobody, and both ends must stay until they are done


@cache
def _copy_stream(device_index: int) -> DeviceStream:
    return DeviceStream(device_index)


class _ReadyBuckets:
    """The header in the publisher's memory, read anew when it did not yet say enough. A read waits for copies that are
    enqueued before it, and these for nobody."""

    def __init__(self, stream: DeviceStream, pointer: int, expected: bytes) -> None:
        self._stream = stream
        self._pointer = pointer
        self._expected = expected
        self._header = np.zeros(HEADER.size, dtype=np.uint8)
        self.num_ready = 0

    def wait(self, bucket: int, patience: Patience) -> None:
        """Until the bucket is ready."""
        while self.num_ready <= bucket:
            self._read()
            if self.num_ready <= bucket:
                patience.pause(READY_POLL_S)

    def _read(self) -> None:
        self._stream.copy(self._header.ctypes.data, self._pointer, HEADER.size)
        self._stream.synchronize()
        found, num_ready = HEADER.unpack(self._header.tobytes())
        # No bucket is ready in memory that is still another version's, or nobody's.
        self.num_ready = num_ready if found == self._expected else 0
