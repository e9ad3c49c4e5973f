"""Splits a batch over ranks and micro-batches, and puts the results of the ranks back into the batch's order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.prefix_tree import PrefixTree
from penstock_learner.batches.sequence_batch import SequenceBatch, token_ranges

_WORTH_SHARING = 0.05
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
        if tree.saved_share >= _WORTH_SHARING:
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
