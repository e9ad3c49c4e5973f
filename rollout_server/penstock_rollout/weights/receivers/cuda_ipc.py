"""cuda_ipc: map the publisher's buckets, which are on the same GPU as this worker, and copy them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda import BUCKET_ALIGNMENT, IPC_HEADER, DeviceStream, IpcOffer, Mappings, identity
from penstock.weights.transports import bucket_offsets, wire_sizes
from penstock_rollout.weights.stage import Arrived, Reception, device_uuid

READY_POLL_S = 0.0005

mappings = Mappings()
"""The mappings of this process."""
_copy_stream = cache(DeviceStream)
"""The stream of a GPU, by its index."""


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield copies of the buckets, on the GPU or in pinned host memory. The rendezvous is an IpcOffer."""
    offer = IpcOffer.from_json(reception.rendezvous)
    sizes = wire_sizes(reception.manifest)
    here = device_uuid(reception.worker_device)
    if offer.device != here:
        raise WeightPushFailed(
            f"the publisher is on GPU {offer.device}, this worker on {here}; cuda_ipc needs one GPU for both, use nccl"
        )
    offsets = bucket_offsets(sizes, BUCKET_ALIGNMENT)
    if offer.num_bytes != offsets[-1]:
        raise WeightPushFailed("the layout of the publisher's GPU memory differs from the manifest")
    index = reception.worker_device.index or 0
    try:
        with mappings.opened(bytes.fromhex(offer.handle), index, reception.manifest.term) as pointer:
            yield from _copies(pointer, offer.num_ready, offsets, sizes, reception, _copy_stream(index))
    except RuntimeError as error:
        raise WeightPushFailed(f"copying the publisher's GPU memory failed: {first_line_of(error)}") from error


def _copies(
    pointer: int, num_ready: int, offsets: list[int], sizes: list[int], reception: Reception, stream: DeviceStream
) -> Iterator[Arrived]:
    """Copy all buckets that should be ready at once, right after reading the header on the same stream. `num_ready` is
    the number that the offer or the last header claimed to be ready. The header just read confirms the claim or not; if
    it does not, the buckets are copied again. Our memory has the same layout as the publisher's."""
    header = torch.empty(IPC_HEADER.size, dtype=torch.uint8, pin_memory=reception.worker_device.type == "cuda")
    reception.spare.clear()  # freed memory stays in torch's cache, from which `buffer` takes it
    memory = reception.buffer(offsets[-1], reception.device)
    done = 0
    try:
        while done < len(sizes):
            stream.copy(header.data_ptr(), pointer + offsets[-1], IPC_HEADER.size)
            start, claimed = offsets[done], range(done, num_ready)
            if claimed:
                stream.copy(memory.data_ptr() + start, pointer + start, offsets[num_ready] - start)
            copied = stream.record()
            arrived = [Arrived(memory[offsets[bucket] : offsets[bucket] + sizes[bucket]]) for bucket in claimed]
            expected = identity(reception.manifest)
            stream.wait(copied, reception.deadline)
            found, num_ready = IPC_HEADER.unpack(header.numpy().tobytes())
            if found != expected:  # the memory holds another version, or none
                num_ready = 0
            if claimed and num_ready >= claimed.stop:
                yield from arrived
                done = claimed.stop
            elif num_ready <= done:
                reception.deadline.sleep(READY_POLL_S)
    finally:
        stream.synchronize()  # both memories must outlive the copies
