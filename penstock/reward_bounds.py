"""Which numbers are rewards. Everything that accepts a reward asks here. Reward processes import it, so it is light."""

from __future__ import annotations

MAX_REWARD = 1e15
"""Largest absolute reward. The learner computes in float32, where sums of squares of larger rewards would overflow."""
RANGE = f"between -{MAX_REWARD:g} and {MAX_REWARD:g}"


def is_reward(value: float) -> bool:
    """Whether a number can be trained on as a reward: it is finite, and at most MAX_REWARD in size."""
    return abs(value) <= MAX_REWARD  # False for NaN
