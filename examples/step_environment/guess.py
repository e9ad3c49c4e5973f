"""An environment with Gymnasium's interface: guess a number from 1 to 9."""

from __future__ import annotations

import random
import re
from typing import Any


class Guess:
    """Answers each guess with `higher` or `lower`. The reward is 1 for the number. The game ends after four guesses."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.number = random.Random(seed).randint(1, 9)
        self.guesses_left = 4
        return "Guess a number from 1 to 9.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the model's words. Returns observation, reward, terminated, truncated and further facts."""
        self.guesses_left -= 1
        found = re.search(r"\d+", action)
        guess = int(found[0]) if found else 0
        hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return hint, float(hint == "right"), hint == "right", self.guesses_left == 0, {}
