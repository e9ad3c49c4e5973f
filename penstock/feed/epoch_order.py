"""Which rows each epoch of a dataset has, and in which order. It follows from the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput


class EpochOrder:
    """An epoch has each row once, or as often as the weight of its file says."""

    def __init__(self, parts: Sequence[tuple[int, float]], *, shuffle: bool, seed: int) -> None:
        """`parts` has the number of rows and the weight of each file."""
        self.parts = parts
        self.shuffle = shuffle
        self.seed = seed
        self.num_rows = sum(_num_drawn(count, weight) for count, weight in parts)
        """Number of rows of one epoch."""
        self.rows = lru_cache(maxsize=2)(self._rows)
        """The rows of an epoch by its number, in order."""

    def _rows(self, epoch: int) -> NDArray[np.int64]:
        # numpy guarantees RandomState's streams, so a run continues in the same order under every release of numpy.
        if all(weight == 1.0 for _, weight in self.parts):
            chosen = np.arange(self.num_rows)
        else:
            drawn, first = [], 0
            for number, (count, weight) in enumerate(self.parts):
                drawn.append(first + self._draw(epoch, number, count, weight))
                first += count
            chosen = np.concatenate(drawn)
        if not self.shuffle:
            return chosen
        return chosen[np.random.RandomState([self.seed, epoch]).permutation(len(chosen))]

    def _draw(self, epoch: int, part: int, count: int, weight: float) -> NDArray[np.int64]:
        """The rows of a file that an epoch has: all of them for each whole part of the weight, and then some, which
        are others in each epoch until all have come."""
        whole, rest = divmod(_num_drawn(count, weight), count)
        rows = np.tile(np.arange(count), whole)
        order = np.random.RandomState([self.seed, part, 1]).permutation(count)
        return np.concatenate([rows, np.sort(np.take(order, np.arange(epoch * rest, (epoch + 1) * rest), mode="wrap"))])


def require_drawn(parts: Sequence[tuple[int, float]], where: str) -> None:
    """Raise InvalidInput if an epoch would have no row of a file."""
    for count, weight in parts:
        if not _num_drawn(count, weight):
            raise InvalidInput(where, f"weight {weight:g} leaves none of a file's {count} rows; raise it")


def _num_drawn(count: int, weight: float) -> int:
    """How many rows an epoch has of a file."""
    return round(count * weight)
