"""Batches of whole sequences, concatenated without padding, with named fields per token and per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, PoisonGroup
from penstock.trajectory import Group, Trajectory, temperature_of_log_probs

BY_SEQUENCE = ("lengths", "prompt_lengths", "rewards", "group_ids", "is_baseline", "episodes")
"""The fields of a batch with one entry per sequence."""
BY_TOKEN = ("token_ids", "routed_experts")
"""The fields of a batch with one entry per token of prompt and response. All others have one per response token."""
REWARD_PART = "reward_part/"
"""Followed by its name, the sequence field of a part of the reward."""
OWN = ("token_fields", "sequence_fields")
"""The fields of a batch that hold a step's own arrays by name."""
Array = NDArray[Any]


@dataclass(frozen=True)
class SequenceBatch:
    """S sequences: N tokens in all, of which T are response tokens.

    Example: two samples of the prompt [5, 6], with the responses [7] and [8, 9]:
    token_ids = [5, 6, 7, 5, 6, 8, 9], lengths = [3, 4], prompt_lengths = [2, 2], and every [T] array has 3 entries.

    A step adds what it computes as fields: `batch.with_token_fields(teacher_log_probs=...)`, and reads them as
    `batch["teacher_log_probs"]`. Every method keeps all fields aligned. A batch is never changed in place.
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
    token_rewards: NDArray[np.float32] | None = None
    """[T] rewards of single tokens, such as those of turns, which are part of `rewards`. None if there are none."""
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
    episodes: NDArray[np.int64] | None = None
    """[S] sequences of a group with the same number are one sample of it, such as the paths of a session; 0 for a
    sequence that is a separate sample. None if all are."""
    routed_experts: NDArray[np.int16] | None = None
    """[N, layers, top_k] the experts that the engine chose for each token, -1 where it reported none."""
    token_fields: Mapping[str, Array] = field(default_factory=dict)
    """[T, ...] a step's own fields with one entry per response token, by name."""
    sequence_fields: Mapping[str, Array] = field(default_factory=dict)
    """[S, ...] a step's own fields with one entry per sequence, by name."""

    def __getitem__(self, name: str) -> Array:
        """The field of this name. Raises ValueError if the batch does not have it."""
        found: Array | None = self.arrays.get(name)
        if found is None:
            raise ValueError(f"the batch has no field {name!r}; it has {', '.join(self.arrays)}")
        return found

    @property
    def arrays(self) -> dict[str, Array]:
        return {**self._standard(), **self.token_fields, **self.sequence_fields}

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
        return token_ranges(starts, self.response_lengths)

    @property
    def unmixed_versions(self) -> NDArray[np.int64]:
        """[T] the version of each token, or -1 in trajectories of several versions: the engine continues with keys and
        values of the old weights, so its log-probs are not those of a forward pass under one version."""
        starts = np.cumsum(self.response_lengths) - self.response_lengths
        low = np.minimum.reduceat(self.token_versions, starts)
        high = np.maximum.reduceat(self.token_versions, starts)
        versions: NDArray[np.int64] = np.repeat(np.where(low == high, low, -1), self.response_lengths)
        return versions

    def select(self, sequences: Sequence[int]) -> SequenceBatch:
        chosen = np.asarray(sequences, dtype=np.int64)
        token_index = token_ranges((np.cumsum(self.lengths) - self.lengths)[chosen], self.lengths[chosen])
        responses = self.response_lengths
        response_index = token_ranges((np.cumsum(responses) - responses)[chosen], responses[chosen])
        selected: dict[str, Any] = {}
        for name, array in self._standard().items():
            index = token_index if name in BY_TOKEN else chosen if name in BY_SEQUENCE else response_index
            selected[name] = array[index]
        return SequenceBatch(
            **selected,
            token_fields={name: array[response_index] for name, array in self.token_fields.items()},
            sequence_fields={name: array[chosen] for name, array in self.sequence_fields.items()},
        )

    def split(self, num_parts: int) -> list[SequenceBatch]:
        """Split into parts of neighbouring sequences, so that most groups stay whole. There are no empty parts."""
        if num_parts == 1:
            return [self]
        parts = np.array_split(np.arange(self.num_sequences), min(num_parts, self.num_sequences))
        return [self.select(part.tolist()) for part in parts]

    def with_token_fields(self, **arrays: Array) -> SequenceBatch:
        """The batch with these fields added or replaced. Each has one entry per response token."""
        return self._with("token_fields", int(self.response_lengths.sum()), arrays)

    def with_sequence_fields(self, **arrays: Array) -> SequenceBatch:
        """The batch with these fields added or replaced. Each has one entry per sequence."""
        return self._with("sequence_fields", self.num_sequences, arrays)

    def select_fields(self, *names: str) -> SequenceBatch:
        """The batch with only these optional fields, and the fields that every batch has. Ranks are sent less then."""
        unknown = [name for name in names if name not in self.arrays]
        if unknown:
            raise ValueError(f"the batch has no field {unknown[0]!r}; it has {', '.join(self.arrays)}")
        kept: dict[str, Any] = {
            kind: {name: array for name, array in getattr(self, kind).items() if name in names} for kind in OWN
        }
        kept |= {each.name: None for each in fields(self) if each.default is None and each.name not in names}
        return replace(self, **kept)

    def has_sequences_of(self, other: SequenceBatch) -> bool:
        """Whether both batches have the same sequences in the same order."""
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.token_ids, other.token_ids)

    def union(self, other: SequenceBatch) -> SequenceBatch:
        """The batch with the fields of another batch of the same sequences. A field that both have must be equal."""
        if not self.has_sequences_of(other):
            raise ValueError("union needs two batches of the same sequences in the same order; concat joins others")
        for name in self.arrays.keys() & other.arrays.keys():
            if not np.array_equal(self[name], other[name], equal_nan=self[name].dtype.kind == "f"):
                raise ValueError(f"both batches have a field {name!r}, and they differ; omit it in one of them")
        joined: dict[str, Any] = {kind: {**getattr(self, kind), **getattr(other, kind)} for kind in OWN}
        return replace(self, **(joined | other._standard()))

    def without_baselines(self) -> SequenceBatch:
        """The batch without its greedy samples, which are not trained."""
        return self if self.is_baseline is None else self.select(np.flatnonzero(~self.is_baseline).tolist())

    def without_loss(self) -> SequenceBatch:
        """The batch with an empty loss mask. A rank without a sequence runs it to take part in the collectives."""
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))

    def _standard(self) -> dict[str, Array]:
        """The fields that are set and that a step did not add."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OWN}
        return {name: array for name, array in found.items() if array is not None}

    def _with(self, kind: str, num_entries: int, arrays: Mapping[str, Array]) -> SequenceBatch:
        """The batch with fields of one kind. Floating point numbers are kept in float32."""
        standard = {each.name for each in fields(self)} - set(OWN)
        other_kind = self.sequence_fields if kind == "token_fields" else self.token_fields
        for name, array in arrays.items():
            is_misplaced = name in standard and (name in BY_SEQUENCE) != (kind == "sequence_fields")
            if is_misplaced or name in BY_TOKEN or name in other_kind:
                raise ValueError(f"the batch has a field {name!r} of another kind than {kind}; choose another name")
            if len(array) != num_entries:
                raise ValueError(f"field {name!r} has {len(array)} entries; it needs {num_entries}, see {kind}")
        kept = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}
        changed: dict[str, Any] = {name: array for name, array in kept.items() if name in standard}
        own = {name: array for name, array in kept.items() if name not in standard}
        return replace(self, **(changed | {kind: {**getattr(self, kind), **own}}))


def unsampled_batch(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int64], prompt_lengths: NDArray[np.int64],
    group_ids: NDArray[np.int64],
) -> SequenceBatch:  # fmt: skip
    """Sequences that no engine has sampled: all responses are trained, and rewards, log-probs and versions are 0."""
    num_tokens = int((lengths - prompt_lengths).sum())
    return SequenceBatch(
        token_ids, lengths, prompt_lengths, np.zeros(len(lengths), np.float32), group_ids,
        loss_mask=np.ones(num_tokens, np.uint8), behaviour_log_probs=np.zeros(num_tokens, np.float32),
        token_versions=np.zeros(num_tokens, np.int64), temperatures=np.ones(num_tokens, np.float32),
    )  # fmt: skip


def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """The sequences of all batches, one batch after another. The batches must have the same fields."""
    first = batches[0]
    for batch in batches[1:]:
        if different := batch.arrays.keys() ^ first.arrays.keys():
            raise ValueError(f"concat needs batches with the same fields; not all have {', '.join(sorted(different))}")

    def joined(names: Sequence[str]) -> dict[str, Any]:
        return {name: np.concatenate([batch[name] for batch in batches]) for name in names}

    own: dict[str, Any] = {kind: joined(list(getattr(first, kind))) for kind in OWN}
    return SequenceBatch(**joined(list(first._standard())), **own)


def batch_of(groups: Sequence[Group], *, with_experts: bool = True, reward_keys: Sequence[str] = ()) -> SequenceBatch:
    """A batch of all trajectories of the groups, in order. Routed experts, which are large, can be omitted. The parts
    of the reward that `reward_keys` names become fields."""
    pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    is_baseline = np.array([t.is_baseline for _, t in pairs], dtype=np.bool_)
    episodes = np.array([t.episode for _, t in pairs], dtype=np.int64)
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
        token_versions=_token_versions([t for _, t in pairs]),
        temperatures=_temperatures(pairs),
        token_rewards=_token_rewards([t for _, t in pairs]),
        is_baseline=is_baseline if is_baseline.any() else None,
        episodes=episodes if episodes.any() else None,
        routed_experts=_routed_experts(pairs) if with_experts else None,
        sequence_fields={REWARD_PART + key: _reward_part(key, [t for _, t in pairs]) for key in reward_keys},
    )


def _token_versions(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """[T] the version of every token. The segments of a trajectory cover it without gaps."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    versions = np.array([segment.policy_version for segment in segments], dtype=np.int64)
    return np.repeat(versions, [segment.end - segment.start for segment in segments])


def _temperatures(pairs: Sequence[tuple[Group, Trajectory]]) -> NDArray[np.float32]:
    """[T] the temperature at which the log-prob of every token was taken."""
    if any(trajectory.sampling_segments for _, trajectory in pairs):
        return np.concatenate([trajectory.token_temperatures(group.sampling) for group, trajectory in pairs])
    each = np.array([temperature_of_log_probs(group.sampling.temperature) for group, _ in pairs], dtype=np.float32)
    return np.repeat(each, [len(trajectory.token_ids) for _, trajectory in pairs])


def _reward_part(key: str, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
    """[S] a part of the reward; `score` is the reward function's own. A failed reward has no parts, and counts as 0.
    Raises ConfigError if another sample has no such part."""
    parts = [{"score": t.reward} | t.reward_parts for t in trajectories]
    for trajectory, found in zip(trajectories, parts, strict=True):
        if key not in found and not trajectory.reward_failed:
            raise ConfigError(
                f"learner.algorithm.advantage.reward_keys: a sample's reward has no part {key!r}, it has"
                f" {', '.join(sorted(found))}; return it from the reward function as a number of its mapping"
            )
    return np.array([found.get(key, 0.0) for found in parts], dtype=np.float32)


def _token_rewards(trajectories: Sequence[Trajectory]) -> NDArray[np.float32] | None:
    """[T] the rewards of single tokens, 0 for all others."""
    if not any(trajectory.token_rewards for trajectory in trajectories):
        return None
    parts = [np.zeros(len(trajectory.token_ids), dtype=np.float32) for trajectory in trajectories]
    for part, trajectory in zip(parts, trajectories, strict=True):
        for given in trajectory.token_rewards:
            part[given.index] = given.reward
    return np.concatenate(parts)


def _routed_experts(pairs: Sequence[tuple[Group, Trajectory]]) -> NDArray[np.int16] | None:
    """[N, layers, top_k] of all trajectories, -1 where there are none or another model's."""
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


def token_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])`, vectorised."""
    offsets = np.cumsum(lengths) - lengths
    ranges: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)
    return ranges


def check_tokens(group: Group, vocabulary_size: int) -> None:
    """Raise PoisonGroup for a token that the model does not have. It would end the rank that looks it up."""
    for ids in (group.prompt_token_ids, *(trajectory.token_ids for trajectory in group.trajectories)):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocabulary_size:
            unknown = lowest if lowest < 0 else highest
            raise PoisonGroup("shape", f"token {unknown} is not in the model's vocabulary of {vocabulary_size}")
