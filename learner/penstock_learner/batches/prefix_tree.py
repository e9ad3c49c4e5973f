"""Which tokens of a batch are the same computation: sequences of a group that begin alike, as a tree.

A causal model computes the same for a token wherever the tokens before it are the same. The samples of a group share
their prompt, and the paths of a session share more. The tree stores every such token once:

    [5, 6, 7], [5, 6, 8, 9]   ─►   segments [5, 6] ─┬─ [7]        stored tokens [5, 6, 7, 8, 9]
                                                    └─ [8, 9]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.sequence_batch import SequenceBatch, token_ranges

SHORTEST = 16
"""A beginning of fewer tokens is not shared by long sequences: a segment costs more than it saves."""
WORTH_SHARE = 8
"""A beginning of at least this part (an eighth) of a short sequence is shared, however few tokens it has."""

_FEW = 64
"""Up to so many tokens, Python finds the first difference faster than NumPy."""


def shortest_shared(length: int) -> int:
    """The fewest tokens that a sequence of `length` tokens shares with others, and for which one of them is cut."""
    return max(1, min(SHORTEST, length // WORTH_SHARE))


@dataclass(frozen=True)
class PrefixTree:
    """M stored tokens in G segments. They stand for the N tokens of a batch's sequences. A segment comes before its
    continuations, which follow it without a gap. So the tokens that a token sees are before it, and the tokens that see
    it are in one range after it."""

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
        contents = _Contents(batch)
        roots: defaultdict[int, _Segment] = defaultdict(lambda: _Segment(None, 0, 0, 0))
        found: dict[tuple[int, bytes], _Segment] = {}
        last = []
        starts = np.cumsum(batch.lengths) - batch.lengths
        for group, start, length in zip(batch.group_ids.tolist(), starts.tolist(), batch.lengths.tolist(), strict=True):
            whole = (group, contents.between(start, start + length))
            segment = found.get(whole)
            if segment is None:
                segment = found[whole] = _insert(contents, roots[group], start, length)
            last.append(segment)
        segments = [segment for root in roots.values() for segment in _below(root)]
        for index, segment in enumerate(segments):
            segment.index = index
        sizes = np.array([segment.size for segment in segments], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        parents = [segment.parent.index if segment.parent else -1 for segment in segments]
        ends = offsets[1:].tolist()
        for index in range(len(segments) - 1, -1, -1):
            if parents[index] >= 0:
                ends[parents[index]] = max(ends[parents[index]], ends[index])
        paths = {segment.index: [each.index for each in _upwards(segment)][::-1] for segment in found.values()}
        for segment in segments:  # a segment and its continuations refer to each other, so none would be freed
            segment.parent = None
        on_paths = np.array([index for segment in last for index in paths[segment.index]], dtype=np.int64)
        places = token_ranges(offsets[on_paths], sizes[on_paths])
        stored = token_ranges(np.array([segment.first for segment in segments], dtype=np.int64), sizes)
        positions = token_ranges(np.array([segment.begin for segment in segments], dtype=np.int64), sizes)
        return cls(
            stored, places, positions, np.bincount(places), offsets, np.array(parents, dtype=np.int64), np.array(ends)
        )

    @property
    def num_stored(self) -> int:
        return len(self.stored)

    @property
    def num_shared(self) -> int:
        return len(self.places) - len(self.stored)

    @property
    def saved_share(self) -> float:
        """The share of the batch's tokens that need not be computed."""
        return self.num_shared / len(self.places)


class _Contents:
    """All that makes the tokens of a batch the same computation as others, in forms that are fast to compare."""

    def __init__(self, batch: SequenceBatch) -> None:
        self.token_ids = batch.token_ids
        self.token_at: Callable[[int], int] = batch.token_ids.item
        self.experts = batch.routed_experts
        self._token_bytes = batch.token_ids.tobytes()
        self._token_size = batch.token_ids.itemsize
        self._expert_bytes = b"" if self.experts is None else self.experts.tobytes()
        self._experts_size = 0 if self.experts is None else self.experts[:1].nbytes

    def between(self, start: int, end: int) -> bytes:
        size, experts_size = self._token_size, self._experts_size
        tokens = self._token_bytes[start * size : end * size]
        return tokens + self._expert_bytes[start * experts_size : end * experts_size] if experts_size else tokens

    def num_alike(self, one: int, other: int, at_most: int) -> int:
        """How many tokens from `one` on are the same as those from `other` on."""
        if self.between(one, one + at_most) == self.between(other, other + at_most):
            return at_most
        if self.experts is None and at_most <= _FEW:
            tokens, others = (self.token_ids[first : first + at_most].tolist() for first in (one, other))
            return next(index for index, token in enumerate(tokens) if token != others[index])
        differ = self.token_ids[one : one + at_most] != self.token_ids[other : other + at_most]
        if self.experts is not None:
            differ |= (self.experts[one : one + at_most] != self.experts[other : other + at_most]).any(axis=(1, 2))
        return int(differ.argmax())


@dataclass(eq=False, slots=True)
class _Segment:
    """Tokens that follow each other in one or more sequences. The root of a group has none."""

    parent: _Segment | None
    first: int
    """The index of its first token in the batch."""
    begin: int
    """The position of its first token in its sequences."""
    size: int
    children: dict[int, list[_Segment]] = field(default_factory=dict)
    """Those that continue it, by their first token."""
    index: int = -1
    """Its place among all segments. That of a root stays -1."""

    def split(self, size: int, contents: _Contents) -> _Segment:
        """Cut off the first `size` tokens as a separate segment, which this one continues. So it stays the last
        segment of the sequences that end with it."""
        assert self.parent is not None
        upper = _Segment(self.parent, self.first, self.begin, size, {contents.token_at(self.first + size): [self]})
        siblings = self.parent.children[contents.token_at(self.first)]
        siblings[siblings.index(self)] = upper
        self.parent, self.first, self.begin, self.size = upper, self.first + size, self.begin + size, self.size - size
        return upper


def _insert(contents: _Contents, root: _Segment, start: int, length: int) -> _Segment:
    """Add the sequence that begins at token `start` of the batch. Returns its last segment."""
    shortest = shortest_shared(length)
    path, num_alike = _longest_match(contents, root, start, length)
    at, position = root, 0
    for segment in path if num_alike >= shortest else ():
        rest = num_alike - position
        if position >= shortest > rest:
            break
        at = segment if rest >= segment.size else segment.split(rest, contents)
        position += at.size
    if position == length:
        return at
    own = _Segment(at, start + position, position, length - position)
    at.children.setdefault(contents.token_at(start + position), []).append(own)
    return own


def _longest_match(contents: _Contents, root: _Segment, start: int, length: int) -> tuple[list[_Segment], int]:
    """The segments below a root, from the top down, that begin like the sequence for the most tokens, and how many. The
    whole path counts, because a short sequence may have cut the beginning of long ones into segments of few tokens."""
    deepest, most, waiting = root, 0, [(root, 0)]
    while waiting:
        at, position = waiting.pop()
        for child in at.children.get(contents.token_at(start + position), ()):
            alike = contents.num_alike(child.first, start + position, min(child.size, length - position))
            if position + alike > most:
                deepest, most = child, position + alike
            if alike == child.size and position + alike < length:
                waiting.append((child, position + alike))
    path = []
    while deepest.parent is not None:
        path.append(deepest)
        deepest = deepest.parent
    return path[::-1], most


def _below(root: _Segment) -> Iterator[_Segment]:
    """All segments of a group, each before its continuations."""
    waiting = [root]
    while waiting:
        segment = waiting.pop()
        if segment is not root:
            yield segment
        waiting += [child for alike in reversed(segment.children.values()) for child in reversed(alike)]


def _upwards(segment: _Segment) -> Iterator[_Segment]:
    """The segment, the one that it continues, and so on."""
    at: _Segment | None = segment
    while at is not None and at.index >= 0:
        yield at
        at = at.parent
