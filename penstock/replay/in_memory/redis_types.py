"""Two of Redis' types in memory: a sorted set, and a stream of which only new entries matter."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left, insort

NEVER = float("inf")


class Ordered:
    """A sorted set of ids: lowest score first, and equal scores by the id as text, as in Redis."""

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}
        self._order: list[tuple[float, str, int]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: int) -> bool:
        return key in self._scores

    def score(self, key: int) -> float | None:
        return self._scores.get(key)

    def put(self, key: int, score: float) -> None:
        self.remove(key)
        self._scores[key] = score
        insort(self._order, (score, str(key), key))

    def remove(self, key: int) -> bool:
        score = self._scores.pop(key, None)
        if score is None:
            return False
        del self._order[bisect_left(self._order, (score, str(key), key))]
        return True

    def lowest(self, count: int, below: float = NEVER) -> list[int]:
        return [key for score, _, key in self._order[:count] if score < below]

    def highest(self, count: int) -> list[int]:
        return [key for _, _, key in self._order[: -count - 1 : -1]]

    @property
    def lowest_score(self) -> float:
        return self._order[0][0] if self._order else NEVER


class Signal:
    """Counts events and wakes those who wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self._sent = asyncio.Event()

    def send(self) -> None:
        self.count += 1
        self._sent.set()
        self._sent = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until `count` is not `seen`, or for `timeout_s`; returns the count."""
        if self.count == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._sent.wait()
        return self.count
