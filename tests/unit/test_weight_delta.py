"""Deltas: an encoded bucket is restored byte for byte, and invalid deltas are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import WeightPushFailed
from penstock.weights import delta

ITEM_BYTES = st.sampled_from([1, 2, 4, 8])


def buckets(num_items: int, item_bytes: int, changed: float, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, num_items * item_bytes, dtype=np.uint8)
    bucket = base.copy()
    items = bucket.reshape(num_items, item_bytes)
    items[rng.random(num_items) < changed] ^= 0x55
    return base, bucket


@given(st.integers(0, 300), ITEM_BYTES, st.floats(0, 1), st.integers(0, 2**32))
def test_applying_a_delta_gives_the_bucket(num_items: int, item_bytes: int, changed: float, seed: int) -> None:
    base, bucket = buckets(num_items * 16, item_bytes, changed, seed)
    wire = delta.encode(base, bucket, item_bytes)
    if wire is None:
        return
    assert len(wire) < len(bucket)
    np.testing.assert_array_equal(delta.apply(base, wire, item_bytes), bucket)


def test_a_bucket_that_changed_much_is_sent_whole() -> None:
    base, bucket = buckets(1024, 4, 0.9, 1)
    assert delta.encode(base, bucket, 4) is None


def test_a_bucket_that_did_not_change_costs_a_header() -> None:
    base, _ = buckets(1024, 4, 0.0, 1)
    wire = delta.encode(base, base, 4)
    assert wire is not None and len(wire) == 8


@given(st.integers(0, 200), st.integers(0, 7))
def test_a_torn_or_altered_delta_never_writes_outside_its_bucket(byte: int, bit: int) -> None:
    base, bucket = buckets(256, 2, 0.1, 2)
    wire = delta.encode(base, bucket, 2)
    assert wire is not None
    with pytest.raises(WeightPushFailed):
        delta.apply(base, wire[:-8], 2)
    altered = wire.copy()
    altered[byte % len(wire)] ^= 1 << bit
    try:
        result = delta.apply(base, altered, 2)
    except WeightPushFailed:
        return
    assert len(result) == len(bucket)
