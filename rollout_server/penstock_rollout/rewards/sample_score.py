"""The score of one response."""

from __future__ import annotations

from typing import NamedTuple

from penstock_rollout.rewards.placed_scores import PlacedScore


class SampleScore(NamedTuple):
    """What a scorer says about one response."""

    reward: float
    parts: dict[str, float]
    failed: bool = False
    """Whether the reward could not be computed, so that `reward` is `rollout.reward.error_value`."""
    answer: str | None = None
    """The answer that the reward function has read from the response; None if it does not say."""
    placed: tuple[PlacedScore, ...] = ()
    """Scores of turns, tokens and places of the text. They are part of `reward`."""
