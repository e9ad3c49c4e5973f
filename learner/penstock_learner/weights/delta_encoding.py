"""Encode a bucket as a delta on an earlier version, where the buckets are: on the GPU or in host memory.

penstock/weights/delta.py describes the format. There are two encoders, with the same result: torch's for a GPU, and
numpy's for host memory, which is three times as fast there as torch's and leaves the other cores to other buckets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.weights.delta import GAP_BYTES, HEADER, DeltaLayout

ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOST_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WORD_BYTES = 8
CHUNK_WORDS = 2**22
"""Words that are compared at once on a GPU. It bounds the memory that encoding needs, which is training's."""
CACHED_WORDS = 2**17
"""The same in host memory, where a megabyte stays in the cache of a core."""
LARGEST_GAPS = {gap_bytes: 2 ** (8 * gap_bytes) - 1 for gap_bytes in GAP_BYTES}


def encode(base: torch.Tensor, bucket: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    """Return the delta from `base` to `bucket`, on their device, or None if it is not smaller than the bucket.

    Both are flat uint8 of the same size, a multiple of 8 bytes. On a GPU the kernels run on the current stream."""
    if bucket.is_cuda:
        return encode_with_torch(base, bucket, item_bytes)
    wire = encode_with_numpy(base.numpy(), bucket.numpy(), item_bytes)
    return None if wire is None else torch.from_numpy(wire)


def encode_with_torch(base: torch.Tensor, bucket: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    item, (shift, mask) = ITEMS[item_bytes], _place_in_word(item_bytes)
    found: list[torch.Tensor] = []
    num_found = 0
    pairs = zip(base.view(torch.int64).split(CHUNK_WORDS), bucket.view(torch.int64).split(CHUNK_WORDS), strict=True)
    for index, (old, new) in enumerate(pairs):
        words = (old != new).nonzero().squeeze(1)  # most words are equal
        inside = (old[words].view(item) != new[words].view(item)).nonzero().squeeze(1)
        num_found += len(inside)
        if num_found > _max_items(bucket.numel(), item_bytes):
            return None
        found.append(((words[inside >> shift] + index * CHUNK_WORDS) << shift) + (inside & mask))
    positions = torch.cat(found)
    gaps = positions.diff(prepend=positions.new_full((1,), -1))
    layout = _best_layout(len(gaps), lambda largest: int(((gaps - 1) // largest).sum()), item_bytes)
    if layout.num_bytes >= bucket.numel():
        return None
    if layout.count > len(gaps):
        largest = LARGEST_GAPS[layout.gap_bytes]
        num_full = (gaps - 1) // largest
        bridged = gaps.new_full((layout.count,), largest)
        bridged[(num_full + 1).cumsum(0) - 1] = gaps - num_full * largest
        gaps, positions = bridged, bridged.cumsum(0) - 1
    wire = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=bucket.device)
    wire[: HEADER.size] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8).to(bucket.device)
    wire[layout.gaps] = gaps.to(ITEMS[layout.gap_bytes]).view(torch.uint8)
    wire[layout.values] = bucket.view(item)[positions].view(torch.uint8)
    return wire


def encode_with_numpy(base: NDArray[np.uint8], bucket: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8] | None:
    item, (shift, mask) = HOST_ITEMS[item_bytes], _place_in_word(item_bytes)
    old_words, new_words = base.view(np.uint64), bucket.view(np.uint64)
    found: list[NDArray[np.int64]] = []
    num_found = 0
    for start in range(0, len(old_words), CACHED_WORDS):
        old, new = old_words[start : start + CACHED_WORDS], new_words[start : start + CACHED_WORDS]
        words = np.flatnonzero(old != new)
        inside = np.flatnonzero(old[words].view(item) != new[words].view(item))
        num_found += len(inside)
        if num_found > _max_items(len(bucket), item_bytes):
            return None
        found.append(((words[inside >> shift] + start) << shift) + (inside & mask))
    positions = np.concatenate(found)
    gaps = np.diff(positions, prepend=-1)
    layout = _best_layout(len(gaps), lambda largest: int(((gaps[gaps > largest] - 1) // largest).sum()), item_bytes)
    if layout.num_bytes >= len(bucket):
        return None
    if layout.count > len(gaps):
        largest = LARGEST_GAPS[layout.gap_bytes]
        num_full = (gaps - 1) // largest
        bridged = np.full(layout.count, largest)
        bridged[(num_full + 1).cumsum() - 1] = gaps - num_full * largest
        gaps, positions = bridged, bridged.cumsum() - 1
    wire = np.zeros(layout.num_bytes, dtype=np.uint8)
    wire[: HEADER.size] = np.frombuffer(layout.header, dtype=np.uint8)
    wire[layout.gaps] = gaps.astype(HOST_ITEMS[layout.gap_bytes]).view(np.uint8)
    wire[layout.values] = bucket.view(item)[positions].view(np.uint8)
    return wire


def _best_layout(num_gaps: int, num_bridges: Callable[[int], int], item_bytes: int) -> DeltaLayout:
    """The smallest layout. `num_bridges` counts the items that are sent only because a gap is larger than its
    argument."""
    layouts = [DeltaLayout(num_gaps + num_bridges(LARGEST_GAPS[n]), n, item_bytes) for n in GAP_BYTES]
    return min(layouts, key=lambda layout: layout.num_bytes)


def _max_items(num_bytes: int, item_bytes: int) -> int:
    """The largest number of items for which a delta can be smaller than its bucket."""
    return num_bytes // (min(GAP_BYTES) + item_bytes)


def _place_in_word(item_bytes: int) -> tuple[int, int]:
    """The shift and the mask that split the number of an item into its word and its place there."""
    per_word = WORD_BYTES // item_bytes
    return per_word.bit_length() - 1, per_word - 1
