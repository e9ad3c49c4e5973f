"""How many samples of a prompt a reward process gets in one message.

A message to a process and back takes longer than most rewards: two changes of process, and JSON. So samples whose
rewards are fast travel together. Slow ones travel alone, so that they are computed in all processes at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

TOGETHER_S = 0.005
"""Upper bound on the expected time of one message. It is how much longer a prompt may wait for its scores."""
WEIGHT = 0.2
"""Weight of the newest message in the mean."""

T = TypeVar("T")


class RewardPace:
    """The mean seconds that each reward has taken per sample, by its settings."""

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}

    def parts(self, settings: str, samples: Sequence[T]) -> list[Sequence[T]]:
        """Divide the samples into messages. As long as nothing is known of a reward, its samples go alone."""
        mean_s = self._mean_s.get(settings, TOGETHER_S)
        size = max(1, min(len(samples), int(TOGETHER_S / max(mean_s, 1e-9))))
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def note(self, settings: str, seconds: float, num_samples: int) -> None:
        """A message with this many samples has taken this long in its process."""
        new = seconds / num_samples
        self._mean_s[settings] = new + (1 - WEIGHT) * (self._mean_s.get(settings, new) - new)

    def forget(self, settings: str) -> None:
        """A message has failed as a whole: the next samples go alone."""
        self._mean_s.pop(settings, None)
