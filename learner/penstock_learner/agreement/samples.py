"""Which trajectories of a batch are compared, and what a comparison finds.

Baselines are left out: they are not trained, and greedy decoding reports its log-probs at another temperature. So are
trajectories that one server has continued for another: they would not say which of the two is wrong.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import Group, Trajectory

SHARE = 0.02
"""Share of a batch's tokens that are compared. They cost a forward pass."""
MIN_BUDGET_TOKENS = 4096
"""Tokens that may be compared even if the batch is small."""
PER_SERVER = 16
"""Trajectories of one server that are compared in a step, at most."""
ENOUGH_TOKENS = 256
"""Trained tokens of one server after which no more of its trajectories are compared in a step."""
UNBOUNDED_NATS = 20.0
"""More than any difference that renormalising over one token of a vocabulary can make."""


@dataclass(frozen=True)
class Sample:
    """One trajectory to compare."""

    group: Group
    trajectory: Trajectory

    @property
    def server_id(self) -> str:
        """The server that sampled it."""
        return self.trajectory.server_ids[0] if self.trajectory.server_ids else self.group.server_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.group.prompt_token_ids) + len(self.trajectory.token_ids)

    def as_group(self) -> Group:
        """The group with this trajectory alone."""
        return replace(self.group, trajectories=(self.trajectory,))


@dataclass(frozen=True)
class Comparison:
    """The difference between the log-probs of a server and those of the learner, over the trained tokens of one
    trajectory."""

    server_id: str
    staleness: int
    """Steps of training since the oldest version that sampled a token. 0: both sides used the same weights."""
    num_tokens: int
    mean_nats: float
    """Mean absolute difference."""
    nucleus_nats: float
    """The difference that top-p alone explains: the engine renormalises over a nucleus that holds at least top_p. Under
    top-k and min-p the nucleus may hold anything, so UNBOUNDED_NATS."""


def choose(groups: Sequence[Group], step: int, first: Collection[str] = ()) -> list[Sample]:
    """A few trajectories of every server, of each of its versions, as far as the budget of tokens reaches.

    The servers in `first` always have their turn. The order of the others depends on the step."""
    by_server: dict[str, list[tuple[int, Sample]]] = {}
    for group in groups:
        for place, sample in enumerate(_comparable(group)):
            by_server.setdefault(sample.server_id, []).append((place, sample))
    total = sum(sample.num_tokens for placed in by_server.values() for _, sample in placed)
    budget = max(MIN_BUDGET_TOKENS, SHARE * total)
    chosen: list[Sample] = []
    for name in sorted(by_server, key=lambda name: (name not in first, zlib.crc32(f"{step} {name}".encode()))):
        if name not in first and sum(sample.num_tokens for sample in chosen) >= budget:
            break
        chosen += enough(_in_order(by_server[name])[:PER_SERVER], ENOUGH_TOKENS)
    return chosen


def enough(samples: Sequence[Sample], num_tokens: int) -> list[Sample]:
    """The first samples, until they have this many trained tokens."""
    found, so_far = [], 0
    for sample in samples:
        if so_far >= num_tokens:
            break
        found.append(sample)
        so_far += int(sample.trajectory.loss_mask.sum())
    return found


def _comparable(group: Group) -> list[Sample]:
    return [
        Sample(group, trajectory)
        for trajectory in group.trajectories
        if not trajectory.is_baseline and trajectory.has_trained_token and len(trajectory.server_ids) <= 1
    ]


def _in_order(placed: Sequence[tuple[int, Sample]]) -> list[Sample]:
    """The samples of one server, with the place of each in its group: one of each version in turn, the newest first,
    and from different groups first."""
    ranked = sorted(placed, key=lambda entry: entry[0])
    turns: Counter[int] = Counter()
    ordered = []
    for _, sample in ranked:
        version = sample.trajectory.min_version
        ordered.append((turns[version], -version, sample))
        turns[version] += 1
    return [sample for *_, sample in sorted(ordered, key=lambda entry: entry[:2])]


def compare(samples: Sequence[Sample], staleness: Sequence[int], log_probs: NDArray[np.float32]) -> list[Comparison]:
    """Compare the samples with the learner's log-probs [T] of all their tokens. `staleness` is that of each sample."""
    comparisons, start = [], 0
    for sample, steps in zip(samples, staleness, strict=True):
        trajectory, group = sample.trajectory, sample.group
        trained, end = trajectory.loss_mask.astype(bool), start + len(trajectory.token_ids)
        difference = np.abs(log_probs[start:end] - trajectory.log_probs)[trained]
        nucleus_nats = -math.log(trajectory.min_top_p(group.sampling))
        if trajectory.has_top_k_or_min_p(group.sampling):
            nucleus_nats = UNBOUNDED_NATS
        comparisons.append(Comparison(sample.server_id, steps, len(difference), float(difference.mean()), nucleus_nats))
        start = end
    return comparisons
