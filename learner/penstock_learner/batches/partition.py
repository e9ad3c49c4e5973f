"""Splits a batch over ranks and micro-batches, and puts the results of the ranks back into the batch's order.

`PrefixTree` finds which tokens of a batch are the same computation: sequences of a group that begin alike. A causal
model computes the same for a token wherever the tokens before it are the same. The samples of a group share their
prompt, and the paths of a session share more. The tree stores every such token once:

    [5, 6, 7], [5, 6, 8, 9]   ─►   segments [5, 6] ─┬─ [7]        stored tokens [5, 6, 7, 8, 9]
                                                    └─ [8, 9]
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.sequence_batch import SequenceBatch, token_ranges

_MIN_SAVED_SHARE = 0.05
"""Sequences share prefixes if that saves at least this share of the tokens."""


@dataclass(frozen=True)
class RankShard:
    """A rank's part of a batch. All ranks have the same number of micro-batches, so their collectives match."""

    micro_batches: list[SequenceBatch]
    sequences: list[list[int]]
    """For each micro-batch, the indices of its sequences in the whole batch. A micro-batch that was added only to make
    the counts equal has an empty list."""
    shares_prefixes: bool = False
    """Whether tokens that the sequences of a group begin with are to be computed once."""
    num_shared: int = 0
    """Tokens that need not be computed, because another sequence of their micro-batch has them, by the batch's tree."""
    tree: PrefixTree | None = None
    """The tree of its only micro-batch, if that is the whole batch."""


def partition(
    batch: SequenceBatch, num_ranks: int, max_tokens: int, *, shares_prefixes: bool = False
) -> list[RankShard]:
    """Split a batch over ranks, balanced by tokens, and each part into micro-batches of at most about `max_tokens`.
    With `shares_prefixes`, the sequences of a group stay together as far as the limit and the balance allow, and a
    token that they share counts once. It has no effect on a batch whose sequences share little."""
    if shares_prefixes and batch.num_sequences > 0:
        tree = PrefixTree.of(batch)
        if tree.saved_share >= _MIN_SAVED_SHARE:
            return _SharedPartition(batch, tree).split(num_ranks, max_tokens)
    lengths = batch.lengths.tolist()
    by_rank = _balance(list(range(batch.num_sequences)), lengths, num_ranks)
    heaviest = max(sum(lengths[i] for i in part) for part in by_rank)
    num_micro = min(-(-heaviest // max_tokens), max(len(part) for part in by_rank))
    return [_shard(batch, _balance(part, lengths, num_micro)) for part in by_rank]


class _SharedPartition:
    """Splits a batch into units that stay together: a group, or a part of one."""

    def __init__(self, batch: SequenceBatch, tree: PrefixTree) -> None:
        self.batch = batch
        self.tree = tree
        self.starts = np.cumsum(batch.lengths) - batch.lengths

    def split(self, num_ranks: int, max_tokens: int) -> list[RankShard]:
        if num_ranks == 1 and self.tree.num_stored <= max_tokens:
            everything = list(range(self.batch.num_sequences))
            whole = _shard(self.batch, [everything])
            return [replace(whole, shares_prefixes=True, num_shared=self.tree.num_shared, tree=self.tree)]
        by_group: dict[int, list[int]] = {}
        for sequence, group in enumerate(self.batch.group_ids.tolist()):
            by_group.setdefault(group, []).append(sequence)
        limit = min(max_tokens, -(-self.tree.num_stored // num_ranks))
        units = [unit for group in by_group.values() for unit in self._cut(group, limit)]
        weights = [self._num_stored(unit) for unit in units]
        by_rank = _balance(list(range(len(units))), weights, num_ranks)
        num_micro = max(_num_bins([weights[unit] for unit in part], max_tokens) for part in by_rank)
        shards = []
        for part in by_rank:
            micro_batches = _balance(part, weights, num_micro)
            sequences = [sorted(i for unit in micro for i in units[unit]) for micro in micro_batches]
            own = [sequence for micro in sequences for sequence in micro]
            num_shared = int(self.batch.lengths[own].sum()) - sum(
                self._num_stored(micro) for micro in sequences if micro
            )
            shards.append(replace(_shard(self.batch, sequences), shares_prefixes=True, num_shared=num_shared))
        return shards

    def _cut(self, group: list[int], limit: int) -> list[list[int]]:
        """Cut a group into as few parts of equal numbers of sequences as the limit allows."""
        for num_parts in range(max(1, -(-self._num_stored(group) // limit)), len(group)):
            parts = [part.tolist() for part in np.array_split(np.array(group), num_parts)]
            if all(self._num_stored(part) <= limit for part in parts):
                return parts
        return [[sequence] for sequence in group]

    def _num_stored(self, sequences: list[int]) -> int:
        """Tokens of these sequences. Shared tokens are counted once."""
        places = self.tree.places[token_ranges(self.starts[sequences], self.batch.lengths[sequences])]
        first = int(places.min())  # the tokens of a group are neighbours
        is_stored = np.zeros(int(places.max()) + 1 - first, dtype=np.bool_)
        is_stored[places - first] = True
        return int(is_stored.sum())


def _num_bins(weights: list[int], limit: int) -> int:
    """The fewest bins into which `_balance` distributes the weights without exceeding the limit, if it can."""
    items = list(range(len(weights)))
    for num_bins in range(max(1, -(-sum(weights) // limit)), len(weights)):
        if max(sum(weights[i] for i in part) for part in _balance(items, weights, num_bins)) <= limit:
            return num_bins
    return max(1, len(weights))


def unpermute(
    parts: Sequence[NDArray[np.float32]], shards: Sequence[RankShard], batch: SequenceBatch, *, by_token: bool = True
) -> NDArray[np.float32]:
    """Put the results of all ranks, one for each response token or sequence, back into the batch's order. Each rank's
    result is the concatenation of the results for its micro-batches."""
    sizes = batch.response_lengths if by_token else np.ones(batch.num_sequences, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    result = np.zeros(int(sizes.sum()), dtype=np.float32)
    for values, shard in zip(parts, shards, strict=True):
        offset = 0
        for micro, sequences in zip(shard.micro_batches, shard.sequences, strict=True):
            num_entries = int(micro.response_lengths.sum()) if by_token else micro.num_sequences
            if sequences:
                result[token_ranges(starts[sequences], sizes[sequences])] = values[offset : offset + num_entries]
            offset += num_entries
    return result


def _shard(batch: SequenceBatch, parts: list[list[int]]) -> RankShard:
    shortest = int(np.argmin(batch.lengths))
    micro_batches = [batch.select(part) if part else batch.select([shortest]).without_loss() for part in parts]
    return RankShard(micro_batches, parts)


def _balance(items: list[int], weights: list[int], num_parts: int) -> list[list[int]]:
    """Distribute the items, the heaviest first, each to the part that is lightest so far. A part keeps their order."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for item in sorted(items, key=lambda i: -weights[i]):
        weight, part = heapq.heappop(heap)
        parts[part].append(item)
        heapq.heappush(heap, (weight + weights[item], part))
    return [sorted(part) for part in parts]


# ── shared prefixes ──

MIN_SHARED_TOKENS = 16
"""A beginning of fewer tokens is not shared by long sequences: a segment costs more than it saves."""
MIN_SHARED_FRACTION = 1 / 8
"""A beginning of at least this part of a short sequence is shared, however few tokens it has."""

_SCALAR_SCAN_TOKENS = 64
"""Up to so many tokens, Python finds the first difference faster than NumPy."""


def shortest_shared(length: int) -> int:
    """The fewest tokens that a sequence of `length` tokens shares with others, and for which one of them is cut."""
    return max(1, min(MIN_SHARED_TOKENS, int(length * MIN_SHARED_FRACTION)))


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
        if self.experts is None and at_most <= _SCALAR_SCAN_TOKENS:
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
    """The segments that continue it, by their first token."""
    index: int = -1
    """Its place among all segments, or -1 for a root."""

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
    return list(_upwards(deepest))[::-1], most


def _below(root: _Segment) -> Iterator[_Segment]:
    """All segments of a group, each before its continuations."""
    waiting = [root]
    while waiting:
        segment = waiting.pop()
        if segment is not root:
            yield segment
        waiting += [child for alike in reversed(segment.children.values()) for child in reversed(alike)]


def _upwards(segment: _Segment) -> Iterator[_Segment]:
    """The segment, the one that it continues, and so on, without the root."""
    while segment.parent is not None:
        yield segment
        segment = segment.parent
