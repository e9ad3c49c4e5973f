"""Deltas: an encoded bucket is restored byte for byte, and invalid deltas are refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import WeightPushFailed
from penstock_learner.weights import deltas
from penstock_learner.weights.deltas import encode, encode_with_torch
from penstock_rollout.weights import stage
from penstock_rollout.weights.stage import apply

ITEM_BYTES = st.sampled_from([1, 2, 4, 8])


def buckets(num_items: int, item_bytes: int, changed: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, num_items * item_bytes, dtype=np.uint8)
    bucket = base.copy()
    items = bucket.reshape(num_items, item_bytes)
    items[rng.random(num_items) < changed] ^= 0x55
    return torch.from_numpy(base), torch.from_numpy(bucket)


@given(st.integers(1, 300), ITEM_BYTES, st.floats(0, 1), st.integers(0, 2**32))
def test_applying_a_delta_gives_the_bucket(num_items: int, item_bytes: int, changed: float, seed: int) -> None:
    base, bucket = buckets(num_items * 16, item_bytes, changed, seed)
    wire = encode(base, bucket, item_bytes)
    if wire is None:
        return
    assert wire.numel() < bucket.numel()
    apply(base, wire, item_bytes)
    assert torch.equal(base, bucket)


@given(st.integers(1, 300), ITEM_BYTES, st.floats(0, 0.3), st.integers(0, 2**32))
def test_the_encoder_for_gpus_gives_the_same_bytes(num_items: int, item_bytes: int, changed: float, seed: int) -> None:
    base, bucket = buckets(num_items * 16, item_bytes, changed, seed)
    wire, of_torch = encode(base, bucket, item_bytes), encode_with_torch(base, bucket, item_bytes)
    assert (wire is None) == (of_torch is None)
    if wire is not None and of_torch is not None:
        assert torch.equal(wire, of_torch)


@pytest.mark.parametrize("changed", [0.0, 0.00001, 0.001, 0.01, 0.2])
def test_the_encoder_for_gpus_gives_the_same_bytes_in_chunks(changed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    base, bucket = buckets(400_000, 2, changed, 5)
    monkeypatch.setattr(deltas, "CHUNK_WORDS", 777)
    wire, of_torch = encode(base, bucket, 2), encode_with_torch(base, bucket, 2)
    assert wire is not None and of_torch is not None
    assert torch.equal(wire, of_torch)


@pytest.mark.parametrize("position", [0, 1, 254, 255, 256, 510, 511, 65_534, 65_535, 65_536, 131_071, 399_999])
def test_changes_at_the_limits_of_a_gap_are_restored(position: int) -> None:
    base, bucket = buckets(400_000, 2, 0.0, 1)
    for changed in (position, min(position + 255, 399_999), min(position + 65_536, 399_999)):
        bucket.view(torch.int16)[changed] += 1
    wire = encode(base, bucket, 2)
    assert wire is not None and wire.numel() < 100
    apply(base, wire, 2)
    assert torch.equal(base, bucket)


def test_buckets_of_many_chunks_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "CACHED_WORDS", 100)
    monkeypatch.setattr(stage, "CHUNK_ITEMS", 7)
    base, bucket = buckets(4096, 2, 0.05, 3)
    wire = encode(base, bucket, 2)
    assert wire is not None
    apply(base, wire, 2)
    assert torch.equal(base, bucket)


@pytest.mark.parametrize(("changed", "most"), [(0.1, 0.152), (0.04, 0.061), (0.01, 0.0205), (0.001, 0.0022)])
def test_a_delta_of_bfloat16_has_the_bytes_that_the_docs_say(changed: float, most: float) -> None:
    base, bucket = buckets(2**20, 2, changed, 4)
    wire = encode(base, bucket, 2)
    assert wire is not None
    assert wire.numel() / bucket.numel() < most


def test_a_bucket_that_changed_much_is_sent_whole() -> None:
    base, bucket = buckets(1024, 4, 0.9, 1)
    assert encode(base, bucket, 4) is None


def test_a_bucket_that_did_not_change_costs_a_header() -> None:
    base, _ = buckets(1024, 4, 0.0, 1)
    wire = encode(base, base.clone(), 4)
    assert wire is not None and wire.numel() == 16


@given(st.integers(0, 200), st.integers(0, 7))
def test_a_torn_or_altered_delta_never_writes_outside_its_bucket(byte: int, bit: int) -> None:
    base, bucket = buckets(256, 2, 0.1, 2)
    wire = encode(base, bucket, 2)
    assert wire is not None
    with pytest.raises(WeightPushFailed):
        apply(base.clone(), wire[:-8], 2)
    altered = wire.clone()
    altered[byte % len(wire)] ^= 1 << bit
    around = torch.zeros(base.numel() + 64, dtype=torch.uint8)
    inside = around[32:-32]
    inside.copy_(base)
    with contextlib.suppress(WeightPushFailed):
        apply(inside, altered, 2)
    assert not around[:32].any() and not around[-32:].any()


def test_a_delta_whose_first_gap_is_zero_is_refused() -> None:
    base, bucket = buckets(256, 2, 0.1, 2)
    wire = encode(base, bucket, 2)
    assert wire is not None
    wire[16] = 0
    with pytest.raises(WeightPushFailed, match="outside"):
        apply(base, wire, 2)
