"""Properties of prefix trees, and of batches that are split with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_learner.batches.partition import MIN_SHARED_TOKENS, PrefixTree, partition, shortest_shared, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch
from support.groups import batch_of_sequences, forked_batch, short_batch


@st.composite
def forests(draw: st.DrawFn) -> SequenceBatch:
    """Groups whose sequences are made of a few pieces, so that many begin alike."""
    pieces = [np.full(draw(st.integers(1, 40)), token) for token in range(4)]
    groups = draw(st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6),
                           min_size=1, max_size=4))  # fmt: skip
    sequences = [np.concatenate([pieces[piece] for piece in path]) for group in groups for path in group]
    lengths = np.array([len(sequence) for sequence in sequences])
    empty: Any = {"rewards": np.zeros(len(lengths), np.float32)}
    num_responses = int(lengths.sum()) - len(lengths)
    return SequenceBatch(
        token_ids=np.concatenate(sequences),
        lengths=lengths,
        prompt_lengths=np.ones_like(lengths),
        group_ids=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        loss_mask=np.ones(num_responses, np.uint8),
        behaviour_log_probs=np.zeros(num_responses, np.float32),
        token_versions=np.zeros(num_responses, np.int64),
        temperatures=np.ones(num_responses, np.float32),
        **empty,
    )


@settings(max_examples=60, deadline=None)
@given(forests())
def test_each_token_sees_exactly_the_tokens_before_it(batch: SequenceBatch) -> None:
    tree = PrefixTree.of(batch)
    np.testing.assert_array_equal(batch.token_ids[tree.stored][tree.places], batch.token_ids)
    assert int(tree.counts.sum()) == len(batch.token_ids) and tree.counts.min() >= 1
    ends = np.repeat(tree.ends, np.diff(tree.offsets))
    start = 0
    for length in batch.lengths.tolist():
        path = tree.places[start : start + length]
        np.testing.assert_array_equal(tree.positions[path], np.arange(length))
        last = path[-1]
        seen = np.flatnonzero((np.arange(tree.num_stored) <= last) & (last < ends))
        np.testing.assert_array_equal(seen, path)
        start += length


@settings(max_examples=60, deadline=None)
@given(forests())
def test_what_two_sequences_of_a_group_begin_with_is_stored_once(batch: SequenceBatch) -> None:
    tree = PrefixTree.of(batch)
    starts = np.cumsum(batch.lengths) - batch.lengths
    paths = [tree.places[s : s + n] for s, n in zip(starts.tolist(), batch.lengths.tolist(), strict=True)]
    tokens = [batch.token_ids[s : s + n] for s, n in zip(starts.tolist(), batch.lengths.tolist(), strict=True)]
    for one in range(len(paths)):
        for other in range(one):
            size = min(len(paths[one]), len(paths[other]))
            alike = int(np.append(tokens[one][:size] != tokens[other][:size], True).argmax())
            shared = len(np.intersect1d(paths[one], paths[other]))
            same_group = batch.group_ids[one] == batch.group_ids[other]
            assert shared <= alike if same_group else shared == 0
            assert shared > alike - MIN_SHARED_TOKENS or not same_group


def test_a_short_sequence_does_not_keep_long_ones_from_sharing() -> None:
    long, fork = [5] * 4 + [6] * 200, [5] * 4 + [6] * 100 + [7] * 100
    tree = PrefixTree.of(batch_of_sequences([long, [5] * 4 + [8] * 4, fork], prompt_lengths=[1] * 3, group_ids=[0] * 3))
    assert tree.num_shared == 4 + 104


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 5), st.integers(16, 200))
def test_a_shared_split_has_every_sequence_once_within_the_limit(
    batch: SequenceBatch, num_ranks: int, max_tokens: int
) -> None:
    shards = partition(batch, num_ranks, max_tokens, shares_prefixes=True)
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    assert len({shard.shares_prefixes for shard in shards}) == 1
    found = sorted(i for shard in shards for part in shard.sequences for i in part)
    assert found == list(range(batch.num_sequences))
    if shards[0].shares_prefixes:
        for shard in shards:
            stored = sum(PrefixTree.of(batch.select(part)).num_stored for part in shard.sequences if part)
            shared = sum(int(batch.lengths[part].sum()) for part in shard.sequences) - stored
            # Sequences of other micro-batches may fork where these would not, and the other way round.
            inexact = MIN_SHARED_TOKENS * batch.num_sequences
            assert abs(shard.num_shared - shared) < inexact
            for part in shard.sequences:
                if len(part) > 1:
                    assert PrefixTree.of(batch.select(part)).num_stored < max_tokens + inexact
    numbers = np.arange(len(batch.loss_mask), dtype=np.float32)
    numbered = batch.with_token_fields(number=numbers)
    shards = partition(numbered, num_ranks, max_tokens, shares_prefixes=True)
    parts = [np.concatenate([micro["number"] for micro in shard.micro_batches]) for shard in shards]
    np.testing.assert_array_equal(unpermute(parts, shards, numbered), numbers)


def test_a_group_stays_together_while_it_fits() -> None:
    batch = forked_batch()
    (shard,) = partition(batch, 1, 120, shares_prefixes=True)
    assert shard.shares_prefixes
    groups = [set(batch.group_ids[part].tolist()) for part in shard.sequences]
    assert sorted(group for part in groups for group in part) == [0, 1, 2]
    (alone,) = partition(batch, 1, 120)
    assert len(shard.micro_batches) < len(alone.micro_batches)


def test_a_batch_that_shares_little_is_split_as_before() -> None:
    batch = forked_batch().select([0, 3, 5])
    (shard,) = partition(batch, 1, 60, shares_prefixes=True)
    (alone,) = partition(batch, 1, 60)
    assert not shard.shares_prefixes and shard.sequences == alone.sequences


def test_short_samples_share_every_token_that_they_begin_with() -> None:
    batch = short_batch()
    starts = np.cumsum(batch.lengths) - batch.lengths
    beginnings = {
        (group, batch.token_ids[start : start + end].tobytes())
        for group, start, length in zip(batch.group_ids.tolist(), starts.tolist(), batch.lengths.tolist(), strict=True)
        for end in range(1, length + 1)
    }
    assert batch.lengths.max() < 16 and shortest_shared(int(batch.lengths.max())) == 1
    assert PrefixTree.of(batch).num_stored == len(beginnings) < 0.5 * len(batch.token_ids)


def test_long_sequences_share_only_beginnings_that_are_worth_a_segment() -> None:
    for alike in (MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS):
        sequences = [np.concatenate([np.zeros(alike, np.int64), np.full(200, token)]) for token in (1, 2)]
        tree = PrefixTree.of(batch_of_sequences(sequences, prompt_lengths=[1, 1], group_ids=[0, 0]))
        assert (len(tree.places) - tree.num_stored == alike) == (alike == MIN_SHARED_TOKENS)


def test_equal_sequences_are_stored_once_whatever_their_rest_is() -> None:
    """The second sequence ends a few tokens before the first, and the third is equal to it."""
    whole = np.arange(300)
    batch = batch_of_sequences([whole, whole[:295], whole[:295]], prompt_lengths=[1] * 3, group_ids=[0] * 3)
    assert PrefixTree.of(batch).num_stored == 300


def test_one_rank_whose_batch_fits_gets_it_whole() -> None:
    batch = short_batch()
    tree = PrefixTree.of(batch)
    (shard,) = partition(batch, 1, tree.num_stored, shares_prefixes=True)
    assert shard.sequences == [list(range(batch.num_sequences))] and shard.num_shared == tree.num_shared
    (split,) = partition(batch, 1, tree.num_stored - 1, shares_prefixes=True)
    assert len(split.micro_batches) > 1
