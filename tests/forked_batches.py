"""Batches whose sequences begin alike: groups with one prompt, forks in their responses, and equal samples."""

from __future__ import annotations

from typing import Any

import numpy as np


def forked_batch(vocabulary: int = 60, *, scale: int = 1) -> Any:
    """A `SequenceBatch` of three groups. Half of the tokens are shared. `scale` multiplies all lengths."""
    random = np.random.default_rng(1)
    sequences, prompt_lengths, group_ids = [], [], []
    for group, (prompt_length, responses) in enumerate([(19, (4, 7, 3)), (5, (6, 2)), (30, (1, 9, 9, 5))]):
        prompt, turn = (random.integers(3, vocabulary, length * scale) for length in (prompt_length, 17))
        for index, length in enumerate(responses):
            fork = [turn] if index % 2 else []
            sequences.append(np.concatenate([prompt, *fork, random.integers(3, vocabulary, length * scale)]))
            prompt_lengths.append(prompt_length * scale)
            group_ids.append(group)
    sequences += [sequences[-1].copy(), sequences[-2][: -3 * scale].copy()]
    prompt_lengths += prompt_lengths[-1:] * 2
    group_ids += group_ids[-1:] * 2
    return _batch_of(random, sequences, prompt_lengths, group_ids)


def equal_batch(length: int, vocabulary: int = 60) -> Any:
    """Two groups of four samples. Prompts and responses have the same `length`."""
    random = np.random.default_rng(1)
    prompts = random.integers(3, vocabulary, (2, length))
    responses = random.integers(3, vocabulary, (8, length))
    sequences = [np.concatenate([prompts[index // 4], response]) for index, response in enumerate(responses)]
    return _batch_of(random, sequences, [length] * 8, [index // 4 for index in range(8)])


def short_batch(vocabulary: int = 60) -> Any:
    """Four groups of eight samples with prompts of 6 tokens and answers of 1 to 4. Many answers are equal."""
    random = np.random.default_rng(1)
    prompts = random.integers(3, vocabulary, (4, 6))
    answers = [np.append(random.integers(3, 6, random.integers(0, 4)), 1) for _ in range(32)]
    sequences = [np.concatenate([prompts[index // 8], answer]) for index, answer in enumerate(answers)]
    return _batch_of(random, sequences, [6] * 32, [index // 8 for index in range(32)])


def batch_of_sequences(sequences: list[Any], *, prompt_lengths: list[int], group_ids: list[int]) -> Any:
    """A `SequenceBatch` of these sequences."""
    return _batch_of(np.random.default_rng(1), sequences, prompt_lengths, group_ids)


def _batch_of(random: Any, sequences: list[Any], prompt_lengths: list[int], group_ids: list[int]) -> Any:
    from penstock_learner.batches.sequence_batch import SequenceBatch

    lengths = np.array([len(sequence) for sequence in sequences])
    num_responses = int(lengths.sum()) - sum(prompt_lengths)
    return SequenceBatch(
        token_ids=np.concatenate(sequences),
        lengths=lengths,
        prompt_lengths=np.array(prompt_lengths),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        group_ids=np.array(group_ids),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.zeros(num_responses, dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=random.uniform(0.7, 1.3, num_responses).astype(np.float32),
        advantages=random.normal(size=num_responses).astype(np.float32),
    )
