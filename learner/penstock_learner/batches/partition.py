"""Splits a batch over ranks and micro-batches, and puts the results of the ranks back into the batch's order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.sequence_batch import SequenceBatch, token_ranges


@dataclass(frozen=True)
class RankShard:
    """A rank's part of a batch. All ranks have the same number of micro-batches, so their collectives match."""

    micro_batches: list[SequenceBatch]
    sequences: list[list[int]]
    """For each micro-batch, the indices of its sequences in the whole batch. A micro-batch that was added only to make
    the counts equal has an empty list."""


def partition(batch: SequenceBatch, num_ranks: int, max_tokens: int) -> list[RankShard]:
    """Split a batch over ranks, balanced by tokens, and each part into micro-batches of at most about `max_tokens`."""
    lengths = batch.lengths.tolist()
    by_rank = _balance(list(range(batch.num_sequences)), lengths, num_ranks)
    heaviest = max(sum(lengths[i] for i in part) for part in by_rank)
    num_micro = min(-(-heaviest // max_tokens), max(len(part) for part in by_rank))
    return [_shard(batch, _balance(part, lengths, num_micro)) for part in by_rank]


def unpermute(
    parts: Sequence[NDArray[np.float32]], shards: Sequence[RankShard], batch: SequenceBatch
) -> NDArray[np.float32]:
    """Put the per-token results of all ranks back into the batch's order.

    Each rank's result is the concatenation of the results for its micro-batches."""
    responses = batch.response_lengths
    starts = np.cumsum(responses) - responses
    result = np.zeros(int(responses.sum()), dtype=np.float32)
    for values, shard in zip(parts, shards, strict=True):
        offset = 0
        for micro, sequences in zip(shard.micro_batches, shard.sequences, strict=True):
            num_tokens = int(micro.response_lengths.sum())
            if sequences:
                result[token_ranges(starts[sequences], responses[sequences])] = values[offset : offset + num_tokens]
            offset += num_tokens
    return result


def unpermute_sequences(
    parts: Sequence[NDArray[np.float32]], shards: Sequence[RankShard], batch: SequenceBatch
) -> NDArray[np.float32]:
    """Like `unpermute`, for results with one entry per sequence."""
    result = np.zeros(batch.num_sequences, dtype=np.float32)
    for values, shard in zip(parts, shards, strict=True):
        offset = 0
        for micro, sequences in zip(shard.micro_batches, shard.sequences, strict=True):
            result[sequences] = values[offset : offset + len(sequences)]
            offset += micro.num_sequences
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
