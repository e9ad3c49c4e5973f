"""Encode a bucket as a delta on an earlier version, where the buckets are: on the GPU or in host memory.

penstock/weights/delta.py describes the format."""

from __future__ import annotations

import torch

from penstock.weights.delta import GAP_BYTES, HEADER, DeltaLayout

ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_BYTES = 8
CHUNK_WORDS = 2**22
"""Words that are compared at once. It bounds the memory that encoding needs, which on a GPU is training's."""


def encode(base: torch.Tensor, bucket: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    """Return the delta from `base` to `bucket`, on their device, or None if it is not smaller than the bucket.

    Both are flat uint8 of the same size, a multiple of 8 bytes. The kernels run on the current stream."""
    positions = _changed_items(base, bucket, item_bytes)
    if positions is None:
        return None
    gaps = positions.diff(prepend=positions.new_full((1,), -1))
    counts = {width: len(gaps) + int(((gaps - 1) // _largest(width)).sum()) for width in GAP_BYTES}
    layouts = [DeltaLayout(count, width, item_bytes) for width, count in counts.items()]
    layout = min(layouts, key=lambda layout: layout.num_bytes)
    if layout.num_bytes >= bucket.numel():
        return None
    gaps = _bridged(gaps, layout)
    wire = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=bucket.device)
    wire[: HEADER.size] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8).to(bucket.device)
    wire[layout.gaps] = gaps.to(ITEMS[layout.gap_bytes]).view(torch.uint8)
    wire[layout.values] = bucket.view(ITEMS[item_bytes])[gaps.cumsum(0) - 1].view(torch.uint8)
    return wire


def _changed_items(base: torch.Tensor, bucket: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    """The positions of the items that differ, in order; None if there are too many for a delta.

    Whole words are compared first, because most are equal."""
    per_word, word = WORD_BYTES // item_bytes, torch.int64
    max_items = bucket.numel() // (min(GAP_BYTES) + item_bytes)
    found: list[torch.Tensor] = []
    num_found = 0
    pairs = zip(base.view(word).split(CHUNK_WORDS), bucket.view(word).split(CHUNK_WORDS), strict=True)
    for index, (old, new) in enumerate(pairs):
        words = (old != new).nonzero().squeeze(1)
        differs = old[words].view(ITEMS[item_bytes]) != new[words].view(ITEMS[item_bytes])
        num_found += int(differs.count_nonzero())
        if num_found > max_items:
            return None
        inside = differs.nonzero().squeeze(1)
        of_word = words[inside // per_word] + index * CHUNK_WORDS
        found.append(of_word * per_word + inside % per_word)
    return torch.cat(found)


def _bridged(gaps: torch.Tensor, layout: DeltaLayout) -> torch.Tensor:
    """Split the gaps that are too large for their bytes."""
    largest = _largest(layout.gap_bytes)
    if layout.count == len(gaps):
        return gaps
    num_full = (gaps - 1) // largest
    bridged = gaps.new_full((layout.count,), largest)
    bridged[(num_full + 1).cumsum(0) - 1] = gaps - num_full * largest
    return bridged


def _largest(gap_bytes: int) -> int:
    """The largest gap that so many bytes can say."""
    return int(2 ** (8 * gap_bytes) - 1)
