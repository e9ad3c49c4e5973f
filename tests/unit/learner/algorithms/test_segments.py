"""Segment operations, most of all the reverse scan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_learner.algorithms.aggregation import (
    count_segments,
    masked_mean,
    reverse_scan,
    reverse_scan_masked,
    segment_mean,
    segment_min,
    segment_sum,
    shift_left,
    whiten,
)

VALUES = torch.tensor([1.0, 2.0, 4.0, -3.0])
IDS = torch.tensor([0, 0, 2, 2])


def test_reductions_leave_an_empty_segment_at_zero() -> None:
    assert segment_sum(VALUES, IDS, 3).tolist() == [3, 0, 1]
    assert segment_min(VALUES, IDS, 3).tolist() == [1, 0, -3]
    assert segment_mean(VALUES, torch.tensor([1, 1, 0, 1]), IDS, 3).tolist() == [1.5, 0, -3]
    assert count_segments(IDS) == 3
    assert count_segments(IDS[:0]) == 0


def test_shift_left_stops_at_the_end_of_a_segment() -> None:
    assert shift_left(VALUES, IDS).tolist() == [2, 0, -3, 0]


def test_whitening_without_spread_is_finite() -> None:
    assert whiten(VALUES, torch.tensor([0, 1, 0, 0])).tolist() == [0, 0, 0, 0]
    assert whiten(VALUES, torch.zeros(4)).tolist() == [0, 0, 0, 0]
    assert masked_mean(VALUES, torch.zeros(4)).item() == 0


def test_scan_does_not_run_into_the_next_sequence() -> None:
    assert reverse_scan(VALUES, 0.5, IDS).tolist() == [2, 2, 2.5, -3]
    assert reverse_scan_masked(VALUES, 0.5, torch.tensor([1, 0, 1, 1]), IDS).tolist() == [1, 0, 2.5, -3]
    assert reverse_scan(VALUES[:0], 0.5, IDS[:0]).tolist() == []


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    decay=st.sampled_from([1.0, 0.97, 0.3, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_scan_agrees_with_a_loop(lengths: list[int], decay: float, seed: int) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected, carried = [0.0] * len(values), 0.0
    for t in range(len(values) - 1, -1, -1):
        carried = values[t].item() + (decay * carried if t + 1 < len(values) and ids[t + 1] == ids[t] else 0.0)
        expected[t] = carried
    assert reverse_scan(values, decay, ids).tolist() == pytest.approx(expected, abs=1e-10)
