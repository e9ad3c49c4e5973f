"""Encode a bucket as the items that changed since an earlier version.

    int64 count | int32 index[count], padded to 8 bytes | item value[count], padded to 8 bytes

An item has the size of the smallest dtype of the push; a larger number counts as several items. Deltas are small,
because a step of the optimizer changes few bfloat16 weights by more than their rounding. If a delta is applied to the
wrong base, the checksum of the bucket differs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import WeightPushFailed

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_HEADER_BYTES = 8


def encode(base: NDArray[np.uint8], bucket: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8] | None:
    """Return the delta from `base` to `bucket`, or None if it is not smaller than the bucket."""
    word = _WORDS[item_bytes]
    old, new = base.view(word), bucket.view(word)
    index = np.flatnonzero(old != new)
    if wire_bytes(len(index), item_bytes) >= len(bucket):
        return None
    parts = [
        np.array([len(index)], dtype=np.int64).view(np.uint8),
        _padded(index.astype(np.int32).view(np.uint8)),
        _padded(new[index].view(np.uint8)),
    ]
    wire: NDArray[np.uint8] = np.concatenate(parts)
    return wire


def apply(base: NDArray[np.uint8], wire: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8]:
    """Return the bucket whose delta on `base` is `wire`. Raises WeightPushFailed if `wire` is not a valid delta."""
    word = _WORDS[item_bytes]
    count = int(wire[:_HEADER_BYTES].view(np.int64)[0]) if len(wire) >= _HEADER_BYTES else -1
    if count < 0 or wire_bytes(count, item_bytes) != len(wire):
        raise WeightPushFailed(f"a delta of {len(wire)} bytes claims to hold {count} items")
    values_at = _HEADER_BYTES + _round_up(4 * count)
    index = wire[_HEADER_BYTES : _HEADER_BYTES + 4 * count].view(np.int32)
    bucket = base.copy()
    items = bucket.view(word)
    if count and (index.min() < 0 or index.max() >= len(items)):
        raise WeightPushFailed("a delta points outside its bucket")
    items[index] = wire[values_at : values_at + item_bytes * count].view(word)
    return bucket


def wire_bytes(count: int, item_bytes: int) -> int:
    """Return the size of a delta with `count` items."""
    return _HEADER_BYTES + _round_up(4 * count) + _round_up(item_bytes * count)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _padded(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.pad(part, (0, _round_up(len(part)) - len(part)))
