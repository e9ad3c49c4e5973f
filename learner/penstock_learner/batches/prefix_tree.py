"""Which tokens of a batch are the same computation: sequences of a group that begin alike, as a tree.

A causal model computes the same for a token wherever the tokens before it are the same. The samples of a group share
their prompt, and the paths of a session share more. The tree stores every such token once:

    [5, 6, 7], [5, 6, 8, 9]   ─►   segments [5, 6] ─┬─ [7]        stored tokens [5, 6, 7, 8, 9]
                                                    └─ [8, 9]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.sequence_batch import SequenceBatch

SHORTEST = 16
"""A beginning of fewer tokens is not shared by long sequences: a segment costs more than it saves."""
WORTH_SHARE = 8
"""A beginning of at least this part (an eighth) of a short sequence is shared, however few tokens it has."""


def shortest_shared(length: int) -> int:
    """The fewest tokens that a sequence of `length` tokens shares with others, and for which one of them is cut."""
    return max(1, min(SHORTEST, length // WORTH_SHARE))


@dataclass(frozen=True)
class PrefixTree:
    """M stored tokens in G segments. They stand for the N tokens of a batch's sequences.

    A segment comes before those that continue it, and they follow it without a gap. So the tokens that a token sees
    are before it, and those that see it are in one range after it."""

    stored: NDArray[np.int64]
    """[M] the index, among the N tokens, of a token that each stored one stands for."""
    places: NDArray[np.int64]
    """[N] the stored token of each token."""
    positions: NDArray[np.int64]
    """[M] position of each stored token in its sequences."""
    counts: NDArray[np.int64]
    """[M] how many of the N tokens each stored one stands for."""
    offsets: NDArray[np.int64]
    """[G + 1] where each segment begins among the stored tokens, followed by M."""
    parents: NDArray[np.int64]
    """[G] the segment that each one continues, or -1."""
    ends: NDArray[np.int64]
    """[G] where the last segment that continues it, or itself, ends among the stored tokens."""

    @classmethod
    def of(cls, batch: SequenceBatch) -> PrefixTree:
        """The tree of a batch. Sequences share tokens if they are of the same group and, where the engine's choice of
        experts is replayed, if that is the same too."""
        roots: dict[int, _Segment] = {}
        starts = np.cumsum(batch.lengths) - batch.lengths
        found: dict[tuple[int, bytes], _Segment] = {}
        last = []
        for group, start, length in zip(batch.group_ids.tolist(), starts.tolist(), batch.lengths.tolist(), strict=True):
            whole = (group, _content(batch, start, length))
            if whole not in found:
                root = roots.setdefault(group, _Segment(None, 0, 0, 0))
                found[whole] = _insert(batch, root, start, length)
            last.append(found[whole])
        segments = [segment for root in roots.values() for segment in _below(root)]
        offsets = np.cumsum([0, *(segment.size for segment in segments)])
        for index, segment in enumerate(segments):
            segment.index = index
        parents = np.array([segment.parent.index if segment.parent else -1 for segment in segments], dtype=np.int64)
        ends = offsets[1:].copy()
        for index in range(len(segments) - 1, -1, -1):
            if parents[index] >= 0:
                ends[parents[index]] = max(ends[parents[index]], ends[index])
        own = [np.arange(*ends_of) for ends_of in itertools.pairwise(offsets.tolist())]
        paths = {
            segment.index: np.concatenate([own[each.index] for each in _upwards(segment)][::-1])
            for segment in found.values()
        }
        places = np.concatenate([paths[segment.index] for segment in last])
        stored = np.concatenate([np.arange(each.first, each.first + each.size) for each in segments])
        positions = np.concatenate([np.arange(each.begin, each.begin + each.size) for each in segments])
        return cls(stored, places, positions, np.bincount(places), offsets, parents, ends)

    @property
    def num_stored(self) -> int:
        return len(self.stored)

    @property
    def num_shared(self) -> int:
        """Tokens of the batch that need not be computed."""
        return len(self.places) - len(self.stored)

    @property
    def saved_share(self) -> float:
        """The share of the batch's tokens that need not be computed."""
        return self.num_shared / len(self.places)


@dataclass(eq=False)
class _Segment:
    """Tokens that follow each other in one or more sequences. The root of a group has none."""

    parent: _Segment | None
    first: int
    """The index of its first token in the batch."""
    begin: int
    """The position of its first token in its sequences."""
    size: int
    children: list[_Segment] = field(default_factory=list)
    index: int = -1
    """Its place among all segments. That of a root stays -1."""

    def split(self, size: int) -> _Segment:
        """Cut off the first `size` tokens as a segment of their own, which this one continues. So it stays the last
        segment of the sequences that end with it."""
        assert self.parent is not None
        upper = _Segment(self.parent, self.first, self.begin, size, [self])
        self.parent.children[self.parent.children.index(self)] = upper
        self.parent, self.first, self.begin, self.size = upper, self.first + size, self.begin + size, self.size - size
        return upper


def _insert(batch: SequenceBatch, root: _Segment, start: int, length: int) -> _Segment:
    """Add the sequence that begins at token `start` of the batch. Returns its last segment."""
    shortest = shortest_shared(length)
    path, num_alike = _longest_match(batch, root, start, length)
    at, position = root, 0
    for segment in path if num_alike >= shortest else ():
        rest = num_alike - position
        if position >= shortest > rest:
            break
        at = segment if rest >= segment.size else segment.split(rest)
        position += at.size
    if position == length and length > 0:
        return at
    own = _Segment(at, start + position, position, length - position)
    at.children.append(own)
    return own


def _longest_match(batch: SequenceBatch, root: _Segment, start: int, length: int) -> tuple[list[_Segment], int]:
    """The segments below a root, from the top down, that begin like the sequence for the most tokens, and how many.

    A short sequence may have cut the beginning of long ones into segments of few tokens. So it is the whole path that
    counts, not each segment."""
    deepest, most, waiting = root, 0, [(root, 0)]
    while waiting:
        at, position = waiting.pop()
        for child in at.children:
            alike = _num_alike(batch, child.first, start + position, min(child.size, length - position))
            if position + alike > most:
                deepest, most = child, position + alike
            if alike == child.size and position + alike < length:
                waiting.append((child, position + alike))
    path = []
    while deepest.parent is not None:
        path.append(deepest)
        deepest = deepest.parent
    return path[::-1], most


def _content(batch: SequenceBatch, start: int, length: int) -> bytes:
    """All that makes a sequence the same computation as another one."""
    tokens = batch.token_ids[start : start + length].tobytes()
    return tokens if batch.routed_experts is None else tokens + batch.routed_experts[start : start + length].tobytes()


def _num_alike(batch: SequenceBatch, one: int, other: int, at_most: int) -> int:
    """How many tokens from `one` on are the same as those from `other` on."""
    if batch.token_ids[one] != batch.token_ids[other]:  # most forks differ here
        return 0
    differ = batch.token_ids[one : one + at_most] != batch.token_ids[other : other + at_most]
    if batch.routed_experts is not None:
        experts = batch.routed_experts
        differ |= (experts[one : one + at_most] != experts[other : other + at_most]).any(axis=(1, 2))
    return int(differ.argmax()) if differ.any() else at_most


def _below(root: _Segment) -> Iterator[_Segment]:
    """All segments of a group, each before those that continue it."""
    waiting = root.children[::-1]
    while waiting:
        segment = waiting.pop()
        yield segment
        waiting.extend(reversed(segment.children))


def _upwards(segment: _Segment) -> Iterator[_Segment]:
    """The segment, the one that it continues, and so on."""
    at: _Segment | None = segment
    while at is not None and at.index >= 0:
        yield at
        at = at.parent
