"""Made-up groups, for tests that need training data without a rollout server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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
