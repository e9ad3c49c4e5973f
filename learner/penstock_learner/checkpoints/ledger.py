"""The ledger: the prompts that the weights were trained on.

It is stored as disjoint, sorted, inclusive ranges of prompt ids. Prompts finish nearly in order, so a handful of ranges
is enough for millions of prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np


class Ledger:
    """A set of prompt ids that only grows."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = [(int(first), int(last)) for first, last in ranges]
        self._volatile: set[int] = set()
        """Prompts that no durable checkpoint covers yet."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._ranges)

    def __contains__(self, prompt_id: int) -> bool:
        index = bisect_right(self._ranges, (prompt_id, float("inf"))) - 1
        return index >= 0 and prompt_id <= self._ranges[index][1]

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._ranges)

    def missing(self, bitmap: bytes) -> list[int]:
        """The prompts of a bitmap that the ledger does not hold. The first byte's highest bit stands for prompt 0."""
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8))
        for first, last in self._ranges:
            bits[first : last + 1] = 0
        return [int(prompt_id) for prompt_id in np.flatnonzero(bits)]

    def is_durable(self, prompt_id: int) -> bool:
        """Whether a durable checkpoint covers the prompt, so that its group may be acknowledged."""
        return prompt_id in self and prompt_id not in self._volatile

    def mark_durable(self, prompt_ids: Iterable[int]) -> None:
        """Called when a checkpoint that covers these prompts is on disk."""
        self._volatile.difference_update(prompt_ids)

    def add(self, prompt_ids: Iterable[int]) -> None:
        """Add prompts that were trained. Adding one twice is a bug: its group would have been trained twice."""
        fresh = sorted(prompt_ids)
        assert len(set(fresh)) == len(fresh) and not any(prompt_id in self for prompt_id in fresh), "trained twice"
        merged: list[tuple[int, int]] = []
        for first, last in sorted(self._ranges + [(prompt_id, prompt_id) for prompt_id in fresh]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self._ranges = merged
        self._volatile.update(fresh)
