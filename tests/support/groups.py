"""Made-up groups, samples and batches, for tests that need training data without a rollout server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.samples import Sample, SampleFile, line_of
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment


def make_group(
    prompt_id: int, *, seed: int = 0, num_samples: int = 4, vocab_size: int = 64, version: int = 0, attempt: int = 1
) -> Group:
    """A group with random tokens, plausible log-probs and rewards of 0 and 1. The same arguments give the same
    group."""
    random = np.random.default_rng((seed, prompt_id))
    trajectories = []
    for _ in range(num_samples):
        length = int(random.integers(2, 9))
        trajectories.append(
            Trajectory(
                token_ids=random.integers(2, vocab_size, length).astype(np.int32),
                loss_mask=np.ones(length, dtype=np.uint8),
                log_probs=-random.uniform(0.5, 4.0, length).astype(np.float32),
                segments=(VersionSegment(0, length, version),),
                reward=float(random.integers(0, 2)),
            )
        )
    return Group(
        run="test",
        prompt_id=prompt_id,
        attempt=attempt,
        server_id="rollout-0",
        data_source="test",
        sampling=Sampling(),
        prompt_token_ids=random.integers(2, vocab_size, int(random.integers(1, 6))).astype(np.int32),
        trajectories=tuple(trajectories),
    )


def made_by(prompt_id: int, *versions: int) -> Group:
    """A group whose samples have tokens of these versions, in order."""
    group = make_group(prompt_id)
    trajectories = []
    for trajectory in group.trajectories:
        ends = [len(trajectory.token_ids) * (i + 1) // len(versions) for i in range(len(versions))]
        spans = zip([0, *ends[:-1]], ends, versions, strict=True)
        trajectories.append(replace(trajectory, segments=tuple(VersionSegment(*span) for span in spans)))
    return replace(group, trajectories=tuple(trajectories))


def groups_of(*data_sources: str) -> list[Group]:
    """A group of each of these data sources, with prompt ids from 1."""
    return [replace(make_group(number), data_source=source) for number, source in enumerate(data_sources, start=1)]


SAMPLE = Sample(
    step=1, policy_version=1, prompt_id=7, sample=0, data_source="other", prompt="<|user|>2 + 3?", ground_truth="5",
    response="The sum is 5.", reward=1.0, reward_parts={"format": 0.5}, num_tokens=6, min_version=0, max_version=1,
    finish_reason="stop", is_baseline=False, server_id="rollout-0", agent_name="single_turn_agent", attempt=1,
    finished_at_ms=1_790_000_000_000,
)  # fmt: skip


def group_of_samples(step: int, prompt_id: int, *rewards: float, **changes: Any) -> list[Sample]:
    made = replace(SAMPLE, step=step, policy_version=step, prompt_id=prompt_id, **changes)
    return [replace(made, sample=number, reward=reward) for number, reward in enumerate(rewards or (1.0,))]


def write_samples(folder: Path, *groups: list[Sample], start_step: int = 0, max_bytes: int = 0) -> None:
    """As a learner that starts from `start_step`."""
    file = SampleFile(folder, max_bytes)
    if not groups[0][0].validation:
        file.begin(start_step)
    for group in groups:
        file.write([line_of(group)])


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
