"""Turns sessions into groups: one trajectory for each path, in which every sampled token is trained once.

A call that is on several paths is trained in the first of them. In the others its tokens have mask 0, with the
log-probs and versions that the engine reported. Tokens between two answers have mask 0, log-prob 0, and the version of
the token before them.

All trajectories of a group share its prompt. Paths may begin with different prompts, such as after an edited history:
then the group's prompt is what all of them begin with, and the rest of each prompt has mask 0. Paths that do not even
share the first token become separate groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from penstock.trajectory import Sampling, SamplingSegment, Trajectory, VersionSegment
from penstock_services.gateway.sessions.tree import Call, Ids, SessionTree, num_shared_ids


@dataclass(frozen=True)
class RewardedTree:
    """A session whose calls are complete, and its reward."""

    tree: SessionTree
    reward: float
    reward_parts: Mapping[str, float]


@dataclass(frozen=True)
class SharedPrompt:
    """A group before it has an id."""

    prompt_token_ids: Ids
    sampling: Sampling
    """The sampling parameters of its first call."""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class _Path:
    session: RewardedTree
    episode: int
    """Number of the session in the group, from 1; 0 if it has one path only."""
    prompt: Ids
    calls: tuple[int, ...]
    trained: frozenset[int]
    """The calls that are trained in this path."""

    @property
    def first(self) -> Call:
        return self.session.tree.calls[self.calls[0]]


def shared_prompts(sessions: Sequence[RewardedTree]) -> list[SharedPrompt]:
    """The groups of these sessions. Usually it is one; none if nothing was sampled."""
    by_first_token: dict[int, list[_Path]] = {}
    for number, session in enumerate(sessions, 1):
        lines = session.tree.trained_paths()
        for line, trained in lines:
            prompt, episode = session.tree.prompt_ids(line[0]), number if len(lines) > 1 else 0
            path = _Path(session, episode, prompt, line, trained)
            by_first_token.setdefault(int(prompt[0]), []).append(path)
    return [_shared(alike) for alike in by_first_token.values()]


def _shared(paths: Sequence[_Path]) -> SharedPrompt:
    num_shared = min(num_shared_ids(path.prompt, paths[0].prompt) for path in paths)
    sampling = paths[0].first.sampling
    trajectories = tuple(_trajectory(path, num_shared, sampling) for path in paths)
    return SharedPrompt(paths[0].prompt[:num_shared], sampling, trajectories)


def _trajectory(path: _Path, num_shared: int, sampling: Sampling) -> Trajectory:
    ids: list[Ids] = []
    masks: list[int] = []
    log_probs: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    segments: list[VersionSegment] = []
    samplings: list[tuple[Sampling, int]] = []
    """The sampling of each call, and the number of tokens after it."""
    num_tokens = 0
    calls = [path.session.tree.calls[number] for number in path.calls]
    version = next(segment.policy_version for call in calls for segment in call.segments)

    for place, (number, call) in enumerate(zip(path.calls, calls, strict=True)):
        version = segments[-1].policy_version if segments else version
        inserted = call.extra if place else path.prompt[num_shared:]
        if len(inserted):
            ids.append(inserted)
            masks.extend([0] * len(inserted))
            log_probs.append(np.zeros(len(inserted), dtype=np.float32))
            segments.append(VersionSegment(num_tokens, num_tokens + len(inserted), version))
            num_tokens += len(inserted)
        ids.append(call.token_ids)
        masks.extend([int(number in path.trained)] * len(call.token_ids))
        log_probs.append(call.log_probs)
        segments += [VersionSegment(num_tokens + s.start, num_tokens + s.end, s.policy_version) for s in call.segments]
        num_tokens += len(call.token_ids)
        samplings.append((call.sampling, num_tokens))
    return Trajectory(
        token_ids=np.concatenate(ids, dtype=np.int32), loss_mask=np.array(masks, dtype=np.uint8),
        log_probs=np.concatenate(log_probs, dtype=np.float32), segments=_merged(segments), reward=path.session.reward,
        reward_parts=dict(path.session.reward_parts), finish_reason=calls[-1].finish_reason,
        sampling_segments=_sampling_segments(samplings, sampling), episode=path.episode,
    )  # fmt: skip


def _merged(segments: Sequence[VersionSegment]) -> tuple[VersionSegment, ...]:
    """The segments with neighbours of the same version joined."""
    runs = [list(alike) for _, alike in groupby(segments, key=lambda segment: segment.policy_version)]
    return tuple(VersionSegment(run[0].start, run[-1].end, run[0].policy_version) for run in runs)


def _sampling_segments(calls: Sequence[tuple[Sampling, int]], group: Sampling) -> tuple[SamplingSegment, ...]:
    """One segment for calls in a row with the same parameters, or none if all calls have the group's parameters.

    Inserted tokens belong to the call that follows them."""
    segments: list[SamplingSegment] = []
    for parameters, alike in groupby(calls, key=lambda call: call[0].distribution):
        start, end = segments[-1].end if segments else 0, max(end for _, end in alike)
        if end > start:
            segments.append(SamplingSegment(start, end, **parameters))
    is_as_group = all(sampling.distribution == group.distribution for sampling, _ in calls)
    return () if is_as_group else tuple(segments)
