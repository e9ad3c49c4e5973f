"""The range of float32, in which the learner computes."""

from __future__ import annotations

MAX_FLOAT32 = 3.4028234663852886e38


def is_finite_float32(number: float) -> bool:
    """Whether the number stays finite when the learner converts it to float32: 1e300 and NaN do not."""
    return abs(number) <= MAX_FLOAT32
