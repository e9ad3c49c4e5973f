"""Batches of whole sequences, concatenated without padding, and how they are split over ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import Group, Trajectory

BY_SEQUENCE = ("lengths", "prompt_lengths", "rewards", "group_ids", "is_baseline")
"""The fields of a batch with one entry per sequence."""
BY_TOKEN = ("token_ids", "routed_experts")
"""The fields of a batch with one entry per token of prompt and response."""


@dataclass(frozen=True)
class SequenceBatch:
    """S sequences: N tokens in all, of which T are response tokens.

    Example: two samples of the prompt [5, 6], with the responses [7] and [8, 9]:
    token_ids = [5, 6, 7, 5, 6, 8, 9], lengths = [3, 4], prompt_lengths = [2, 2], and every [T] array has 3 entries.
    """

    token_ids: NDArray[np.int64]
    """[N] prompt and response of each sequence."""
    lengths: NDArray[np.int64]
    """[S] tokens of prompt and response together."""
    prompt_lengths: NDArray[np.int64]
    """[S] tokens of the prompt."""
    rewards: NDArray[np.float32]
    """[S] reward of each sequence."""
    group_ids: NDArray[np.int64]
    """[S] the prompt id."""
    loss_mask: NDArray[np.uint8]
    """[T] 1 where the token is trained, else 0."""
    behaviour_log_probs: NDArray[np.float32]
    """[T] log-probs that the engine reported when it sampled."""
    token_versions: NDArray[np.int64]
    """[T] policy version that sampled the token."""
    temperatures: NDArray[np.float32]
    """[T] the engine's sampling temperature, by which the learner divides the logits of the token."""
    advantages: NDArray[np.float32] | None = None
    """[T] advantage of each token."""
    old_log_probs: NDArray[np.float32] | None = None
    """[T] log-probs of the proximal policy, if the correction recomputes them."""
    reference_log_probs: NDArray[np.float32] | None = None
    """[T] log-probs of the reference policy."""
    values: NDArray[np.float32] | None = None
    """[T] the critic's values at the start of the step."""
    returns: NDArray[np.float32] | None = None
    """[T] the targets of the critic."""
    is_baseline: NDArray[np.bool_] | None = None
    """[S] true for the greedy sample that the others of a group are compared with; None if no group has one."""
    routed_experts: NDArray[np.int16] | None = None
    """[N, layers, top_k] the experts that the engine chose for each token, -1 where it reported none; None if it
    reported none at all."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        return self.lengths - self.prompt_lengths

    @property
    def sequence_ids(self) -> NDArray[np.int64]:
        """[T] the sequence of each response token."""
        return np.repeat(np.arange(self.num_sequences), self.response_lengths)

    @property
    def response_index(self) -> NDArray[np.int64]:
        """[T] the index of each response token among the N tokens."""
        starts = np.cumsum(self.lengths) - self.lengths + self.prompt_lengths
        return _ranges(starts, self.response_lengths)

    @property
    def unmixed_versions(self) -> NDArray[np.int64]:
        """[T] the version of each token, or -1 in trajectories of several versions.

        When weights change while a trajectory is sampled, the engine continues with keys and values of the old weights,
        so its log-probs are not those of a forward pass under one version."""
        starts = np.cumsum(self.response_lengths) - self.response_lengths
        low = np.minimum.reduceat(self.token_versions, starts)
        high = np.maximum.reduceat(self.token_versions, starts)
        versions: NDArray[np.int64] = np.repeat(np.where(low == high, low, -1), self.response_lengths)
        return versions

    def select(self, sequences: Sequence[int]) -> SequenceBatch:
        """A batch of these sequences, in this order."""
        chosen = np.asarray(sequences, dtype=np.int64)
        token_index = _ranges((np.cumsum(self.lengths) - self.lengths)[chosen], self.lengths[chosen])
        responses = self.response_lengths
        response_index = _ranges((np.cumsum(responses) - responses)[chosen], responses[chosen])
        selected = {}
        for field in fields(self):
            array = getattr(self, field.name)
            if array is None:
                continue
            index = token_index if field.name in BY_TOKEN else chosen if field.name in BY_SEQUENCE else response_index
            selected[field.name] = array[index]
        return SequenceBatch(**selected)

    def split(self, num_parts: int) -> list[SequenceBatch]:
        """Split into parts of neighbouring sequences, so that most groups stay whole. There are no empty parts."""
        if num_parts == 1:
            return [self]
        parts = np.array_split(np.arange(self.num_sequences), min(num_parts, self.num_sequences))
        return [self.select(part.tolist()) for part in parts]

    def without_baselines(self) -> SequenceBatch:
        """The batch without its greedy samples, which are not trained."""
        return self if self.is_baseline is None else self.select(np.flatnonzero(~self.is_baseline).tolist())

    def without_loss(self) -> SequenceBatch:
        """The batch with an empty loss mask. A rank without a sequence runs it to take part in the collectives."""
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))


def batch_of(groups: Sequence[Group], *, with_experts: bool = True) -> SequenceBatch:
    """A batch of all trajectories of the groups, in order. Routed experts, which are large, can be left out."""
    pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    is_baseline = np.array([t.is_baseline for _, t in pairs], dtype=np.bool_)
    return SequenceBatch(
        token_ids=np.concatenate(
            [part for group, t in pairs for part in (group.prompt_token_ids, t.token_ids)], dtype=np.int64
        ),
        lengths=np.array([len(g.prompt_token_ids) + len(t.token_ids) for g, t in pairs], dtype=np.int64),
        prompt_lengths=np.array([len(g.prompt_token_ids) for g, _ in pairs], dtype=np.int64),
        rewards=np.array([t.reward for _, t in pairs], dtype=np.float32),
        group_ids=np.array([g.prompt_id for g, _ in pairs], dtype=np.int64),
        loss_mask=np.concatenate([t.loss_mask for _, t in pairs]),
        behaviour_log_probs=np.concatenate([t.log_probs for _, t in pairs]),
        token_versions=np.concatenate([t.token_versions() for _, t in pairs]),
        temperatures=np.concatenate([t.token_temperatures(g.sampling) for g, t in pairs]),
        is_baseline=is_baseline if is_baseline.any() else None,
        routed_experts=_routed_experts(pairs) if with_experts else None,
    )


def _routed_experts(pairs: Sequence[tuple[Group, Trajectory]]) -> NDArray[np.int16] | None:
    """[N, layers, top_k] of all trajectories, -1 where they have none or those of another model."""
    shape = next((t.routed_experts.shape[1:] for _, t in pairs if t.routed_experts is not None), None)
    if shape is None:
        return None
    parts = []
    for group, trajectory in pairs:
        num_tokens = len(group.prompt_token_ids) + len(trajectory.token_ids)
        part = np.full((num_tokens, *shape), -1, dtype=np.int16)
        found = trajectory.routed_experts
        if found is not None and found.shape[1:] == shape:
            part[: len(found)] = found
        parts.append(part)
    return np.concatenate(parts)


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
                result[_ranges(starts[sequences], responses[sequences])] = values[offset : offset + num_tokens]
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


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])`, vectorised."""
    offsets = np.cumsum(lengths) - lengths
    ranges: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)
    return ranges
