"""The format of a delta: the items of a bucket that changed since an earlier version.

    int64 count | int64 gap_bytes | gap[count] | item value[count]          each part padded to 16 bytes

An item has the size of the smallest dtype of the push; a larger number counts as several items. Item i of the delta is
at position gap[0] + … + gap[i] - 1 of the bucket. Gaps are unsigned and at least 1. Where the next change is farther
away than a gap can say, an item that did not change is sent, with its value. So one byte a gap is enough if about one
item in a hundred changed, and two bytes if fewer did.

Deltas are small, because a step of the optimizer changes few bfloat16 weights by more than their rounding. If a delta
is applied to the wrong base, the checksum of the bucket differs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from penstock.errors import WeightPushFailed

HEADER = struct.Struct("<qq")
ALIGNMENT = 16
GAP_BYTES = (1, 2)


@dataclass(frozen=True)
class DeltaLayout:
    """Where the parts of a delta are."""

    count: int
    gap_bytes: int
    item_bytes: int

    @property
    def gaps(self) -> slice:
        return slice(HEADER.size, HEADER.size + self.gap_bytes * self.count)

    @property
    def values(self) -> slice:
        start = _round_up(self.gaps.stop)
        return slice(start, start + self.item_bytes * self.count)

    @property
    def num_bytes(self) -> int:
        return _round_up(self.values.stop)

    @property
    def header(self) -> bytes:
        return HEADER.pack(self.count, self.gap_bytes)


def parse_layout(header: bytes, num_bytes: int, item_bytes: int) -> DeltaLayout:
    """Return the layout of a delta of `num_bytes`. Raises WeightPushFailed if it cannot be one."""
    count, gap_bytes = HEADER.unpack(header) if len(header) == HEADER.size else (-1, 0)
    layout = DeltaLayout(count, gap_bytes, item_bytes)
    if count < 0 or gap_bytes not in GAP_BYTES or layout.num_bytes != num_bytes:
        raise WeightPushFailed(f"a delta of {num_bytes} bytes claims to hold {count} items, with gaps of {gap_bytes}")
    return layout


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
