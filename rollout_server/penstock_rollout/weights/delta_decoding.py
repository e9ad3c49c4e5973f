"""Apply a delta to a bucket, where the bucket is: on the GPU or in host memory.

penstock/weights/delta.py describes the format."""

from __future__ import annotations

import torch

from penstock.errors import WeightPushFailed
from penstock.weights.delta import HEADER, parse_layout

ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ITEMS = 2**22
"""Items that are written at once. It bounds the memory that decoding needs, which on a GPU is the engine's."""


def apply(bucket: torch.Tensor, wire: torch.Tensor, item_bytes: int) -> None:
    """Change the bucket in place. On a GPU the kernels run on the current stream, and are done at the return.

    Raises WeightPushFailed if `wire` is not a valid delta. It then never writes outside the bucket, but a part of the
    delta may have been applied."""
    layout = parse_layout(bytes(wire[: HEADER.size].tolist()), wire.numel(), item_bytes)
    wire = wire.to(bucket.device)
    items = bucket.view(ITEMS[item_bytes])
    gaps = wire[layout.gaps].view(ITEMS[layout.gap_bytes]).split(CHUNK_ITEMS)
    values = wire[layout.values].view(ITEMS[item_bytes]).split(CHUNK_ITEMS)
    last = torch.full((1,), -1, dtype=torch.int64, device=bucket.device)
    for gap, value in zip(gaps, values, strict=True):
        positions = (gap.long() & (2 ** (8 * layout.gap_bytes) - 1)).cumsum(0) + last
        first, last = positions[:1], positions[-1:]
        if len(positions) and not (int(first) >= 0 and int(last) < len(items)):
            raise WeightPushFailed("a delta points outside its bucket")
        items[positions] = value
    if bucket.is_cuda:
        torch.cuda.current_stream().synchronize()
