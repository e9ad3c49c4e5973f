"""Batches are packed, partitioned over ranks and put back into order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.algorithms import AdvantageConfig, AlgorithmConfig
from penstock.errors import ConfigError
from penstock_learner.batches.partition import partition, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of, concat
from penstock_learner.steps.program import with_advantages
from support.groups import make_group


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
    assert unpermute(parts, shards, batch, by_token=False).tolist() == batch.rewards.tolist()


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


def test_versions_of_mixed_trajectories_are_omitted() -> None:
    batch = batch_of([make_group(1, num_samples=2, version=4)])
    versions = batch.token_versions.copy()
    versions[0] = 3
    mixed = replace(batch, token_versions=versions).unmixed_versions
    first = int(batch.response_lengths[0])
    assert mixed.tolist() == [-1] * first + [4] * (len(versions) - first)


def with_own_fields(batch: SequenceBatch) -> SequenceBatch:
    """Own fields whose entries say which token and which sequence they belong to."""
    num_tokens = len(batch.loss_mask)
    return batch.with_token_fields(token_number=np.arange(num_tokens), values=np.ones(num_tokens))\
        .with_sequence_fields(sequence_number=np.arange(batch.num_sequences))  # fmt: skip


def test_own_fields_follow_their_tokens_and_sequences() -> None:
    batch = with_own_fields(some_batch())
    chosen = batch.select([3, 0])
    assert chosen["sequence_number"].tolist() == [3, 0]
    belongs = np.split(np.arange(len(batch.loss_mask)), np.cumsum(batch.response_lengths)[:-1])
    assert chosen["token_number"].tolist() == [*belongs[3], *belongs[0]]
    assert chosen.values is not None and chosen.values.dtype == np.float32
    assert len(chosen.values) == len(chosen["token_number"])
    shard = partition(batch, 2, 40)[1]
    for micro, sequences in zip(shard.micro_batches, shard.sequences, strict=True):
        assert micro["sequence_number"].tolist() == sequences


def test_concat_undoes_split() -> None:
    batch = with_own_fields(some_batch())
    joined = concat(batch.split(3))
    assert joined.arrays.keys() == batch.arrays.keys()
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(joined[name], array)
    with pytest.raises(ValueError, match=r"not all have sequence_number, token_number, values"):
        concat([batch, some_batch()])


def test_union_joins_the_fields_of_the_same_sequences() -> None:
    plain = some_batch()
    left = plain.with_token_fields(left=np.zeros(len(plain.loss_mask)))
    right = plain.with_sequence_fields(right=np.ones(plain.num_sequences), rewards=plain.rewards)
    assert {"left", "right"} <= left.union(right).arrays.keys()
    with pytest.raises(ValueError, match="both batches have a field 'rewards', and they differ"):
        left.union(right.with_sequence_fields(rewards=plain.rewards + 1))
    with pytest.raises(ValueError, match="the same sequences"):
        left.union(plain.select([0, 1]))


def test_select_fields_drops_the_other_optional_fields() -> None:
    batch = with_own_fields(some_batch())
    lean = batch.select_fields("token_number")
    assert lean.arrays.keys() == some_batch().arrays.keys() | {"token_number"}
    with pytest.raises(ValueError, match="no field 'nothing'; it has token_ids"):
        batch.select_fields("nothing")


def test_a_field_of_the_wrong_size_or_kind_is_refused() -> None:
    batch = some_batch()
    with pytest.raises(ValueError, match="'short' has 1 entries; it needs"):
        batch.with_token_fields(short=np.zeros(1))
    with pytest.raises(ValueError, match="'rewards' of another kind"):
        batch.with_token_fields(rewards=np.zeros(len(batch.loss_mask)))
    with pytest.raises(ValueError, match="the batch has no field 'teacher'"):
        batch["teacher"]


def test_parts_of_the_reward_reach_the_advantages() -> None:
    group = make_group(1, num_samples=3)
    parts: list[dict[str, float]] = [{"right": 1.0}, {"right": 0.0}, {}]
    samples = [replace(t, reward=5.0, reward_parts=part) for t, part in zip(group.trajectories, parts, strict=True)]
    failed = replace(group, trajectories=(*samples[:2], replace(samples[2], reward_failed=True)))
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="gdpo", reward_keys=("right", "score")))
    batch = batch_of([failed], reward_keys=algorithm.advantage.reward_keys)
    assert batch["reward_part/right"].tolist() == [1, 0, 0]
    found = with_advantages(batch.select([2, 0, 1]).select([1, 2, 0]), algorithm, 0.0).advantages
    assert found is not None
    by_sample = [found[batch.sequence_ids == number] for number in range(3)]
    assert (by_sample[0] > 0).all() and (by_sample[1] < 0).all(), "the total rewards are equal, but not this part"
    with pytest.raises(ConfigError, match="has no part 'right', it has score"):
        batch_of([replace(group, trajectories=tuple(samples))], reward_keys=("right",))
