"""Batches are packed, partitioned over ranks and put back into order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groups import make_group
from penstock_learner.model.packing import SequenceBatch, batch_of, partition, unpermute, unpermute_sequences


def some_batch(num_groups: int = 5) -> SequenceBatch:
    return batch_of([make_group(prompt_id) for prompt_id in range(1, num_groups + 1)])


def test_a_batch_holds_prompt_and_response_of_each_sample_in_order() -> None:
    group = make_group(7, num_samples=2)
    batch = batch_of([group])
    first, second = group.trajectories
    assert batch.token_ids.tolist() == [
        *group.prompt_token_ids, *first.token_ids, *group.prompt_token_ids, *second.token_ids,
    ]  # fmt: skip
    assert batch.token_ids[batch.response_index].tolist() == [*first.token_ids, *second.token_ids]
    assert batch.sequence_ids.tolist() == [0] * len(first.token_ids) + [1] * len(second.token_ids)
    assert batch.group_ids.tolist() == [7, 7]


def test_select_keeps_every_array_aligned() -> None:
    batch = some_batch()
    chosen = batch.select([3, 0])
    parts = np.split(batch.behaviour_log_probs, np.cumsum(batch.response_lengths)[:-1])
    assert chosen.behaviour_log_probs.tolist() == [*parts[3], *parts[0]]
    assert chosen.rewards.tolist() == [batch.rewards[3], batch.rewards[0]]
    assert len(chosen.token_ids) == batch.lengths[3] + batch.lengths[0]


@given(num_ranks=st.integers(1, 5), max_tokens=st.integers(8, 300), num_groups=st.integers(1, 6))
def test_partition_covers_every_sequence_once_and_ranks_agree(num_ranks: int, max_tokens: int, num_groups: int) -> None:
    batch = some_batch(num_groups)
    shards = partition(batch, num_ranks, max_tokens)
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    covered = [index for shard in shards for part in shard.sequences for index in part]
    assert sorted(covered) == list(range(batch.num_sequences))
    assert all(micro.num_sequences > 0 for shard in shards for micro in shard.micro_batches)


@given(num_ranks=st.integers(1, 5), max_tokens=st.integers(8, 300))
def test_unpermute_undoes_partition(num_ranks: int, max_tokens: int) -> None:
    batch = some_batch()
    shards = partition(batch, num_ranks, max_tokens)
    parts = [np.concatenate([micro.behaviour_log_probs for micro in shard.micro_batches]) for shard in shards]
    assert unpermute(parts, shards, batch).tolist() == batch.behaviour_log_probs.tolist()


@given(num_ranks=st.integers(1, 5), max_tokens=st.integers(8, 300), num_groups=st.integers(1, 3))
def test_unpermute_sequences_undoes_partition(num_ranks: int, max_tokens: int, num_groups: int) -> None:
    batch = some_batch(num_groups)
    batch = replace(batch, rewards=np.arange(batch.num_sequences, dtype=np.float32))
    shards = partition(batch, num_ranks, max_tokens)
    parts = [np.concatenate([micro.rewards for micro in shard.micro_batches]) for shard in shards]
    assert unpermute_sequences(parts, shards, batch).tolist() == batch.rewards.tolist()


def test_baselines_leave_the_batch_and_other_groups_stay() -> None:
    group = make_group(1, num_samples=3)
    marked = replace(group, trajectories=(*group.trajectories[:2], replace(group.trajectories[2], is_baseline=True)))
    batch = batch_of([marked, make_group(2, num_samples=2)])
    assert batch.is_baseline is not None and batch.is_baseline.tolist() == [False, False, True, False, False]
    assert batch.without_baselines().group_ids.tolist() == [1, 1, 2, 2]
    assert batch_of([make_group(2)]).is_baseline is None


def test_a_rank_without_sequences_trains_nothing() -> None:
    batch = batch_of([make_group(1, num_samples=1)])
    _, idle = partition(batch, 2, 1000)
    assert idle.sequences == [[]]
    assert idle.micro_batches[0].loss_mask.sum() == 0


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    shards = partition(some_batch(40), 2, 10**6)
    first, second = (sum(len(m.token_ids) for m in shard.micro_batches) for shard in shards)
    assert first == pytest.approx(second, rel=0.05)


def test_versions_of_mixed_trajectories_are_left_out() -> None:
    batch = batch_of([make_group(1, num_samples=2, version=4)])
    versions = batch.token_versions.copy()
    versions[0] = 3
    mixed = replace(batch, token_versions=versions).unmixed_versions
    first = int(batch.response_lengths[0])
    assert mixed.tolist() == [-1] * first + [4] * (len(versions) - first)
