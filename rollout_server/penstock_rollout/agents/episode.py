"""The result of an agent loop: a trajectory that has not been scored yet; and what is saved of one in Redis.

A sample is saved in pieces, each with the tokens since the piece before it. The last piece of a finished sample has its
episode. Any prefix of the pieces is a valid sample, so a piece that was lost costs the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.codec import decode_saved, encode_saved, trajectory_from_proto, trajectory_to_proto
from penstock.errors import PoisonGroup
from penstock.replay.queue_types import SavedTokens
from penstock.trajectory import ExpertIds, FinishReason, TokenReward, Trajectory, VersionSegment
from penstock.v1 import groups_pb2

RewardUse = Literal["sum", "replace", "last", "record"]
"""`rollout.agents.turn_rewards`."""
Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""
NONE: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Episode:
    """One finished sample. The arrays are those of penstock.trajectory.Trajectory.

    Use `Transcript.episode` to make one: it keeps every invariant."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason
    """`stop` if the model or its environment ended the sample, `length` if a limit on tokens or turns did."""
    num_turns: int = 1
    """Number of assistant turns."""
    last_turn_start: int = 0
    """Index of the first token of the last assistant turn."""
    num_user_turns: int = 0
    """Number of replies to the model: results of the calls of a turn, or a reply of an interaction."""
    tool_rewards: tuple[float, ...] = ()
    """One reward per tool call, in the order of the calls. They are also part of `turn_rewards`."""
    turn_scores: tuple[float, ...] = ()
    """One score per reply of an interaction. They are also part of `turn_rewards`."""
    turn_rewards: tuple[float, ...] = ()
    """One reward per assistant turn. Empty if the agent gives no rewards itself."""
    token_rewards: dict[int, float] = field(default_factory=dict)
    """Rewards of single tokens of the response by their index, in addition to those of turns."""
    final_reward: float | None = None
    """Reward that the environment gave at the end, in addition to the rewards of the turns."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that the agent wants recorded."""
    routed_experts: ExpertIds | None = None
    server_ids: tuple[str, ...] = ()
    """Servers that sampled it, in order, if another server than this one sampled a part of it."""

    @property
    def info_for_rewards(self) -> dict[str, Any]:
        """What reward functions get in `extra_info`, with verl's names. The prompt counts as a turn."""
        return {
            "num_turns": self.num_turns + self.num_user_turns + 1,
            "tool_rewards": list(self.tool_rewards),
            "turn_scores": list(self.turn_scores),
        }


def combine_rewards(scored: Scored, episode: Episode, how: RewardUse) -> Scored:
    """Combine the score of the reward function with the agent's own rewards. Without those the score is unchanged."""
    reward, parts = scored
    final = [] if episode.final_reward is None else [episode.final_reward]
    own = [*episode.token_rewards.values(), *episode.turn_rewards, *final]
    named = {f"turn_{number}": turn for number, turn in enumerate(episode.turn_rewards, start=1)}
    if episode.final_reward is not None:
        named["final"] = episode.final_reward
    if not has_own_rewards(episode):
        return reward, parts | episode.reward_parts
    total = {"sum": reward + sum(own), "replace": sum(own), "last": own[-1], "record": reward}[how]
    return total, {"score": reward} | parts | named | episode.reward_parts


def has_own_rewards(episode: Episode) -> bool:
    return bool(episode.token_rewards or episode.turn_rewards or episode.final_reward is not None)


def token_rewards_of(episode: Episode, how: RewardUse, scored: Mapping[int, float] = NONE) -> tuple[TokenReward, ...]:
    """The agent's rewards of single tokens, and those of turns at the last token of each turn.

    `scored` are those of the reward function, by token. All are part of the reward that `combine_rewards` gives. If the
    agent gives rewards itself, that is one number with `last`, leaves the function out with `replace`, and is the
    function's alone with `record`."""
    own: dict[int, float] = {}
    if how in ("sum", "replace"):
        own = _own_token_rewards(episode)
    if has_own_rewards(episode) and how in ("last", "replace"):
        scored = NONE
    rewards = {index: own.get(index, 0.0) + scored.get(index, 0.0) for index in own.keys() | scored.keys()}
    return tuple(TokenReward(index, reward) for index, reward in sorted(rewards.items()) if reward)


def _own_token_rewards(episode: Episode) -> dict[int, float]:
    trained = np.append(episode.loss_mask, 0).astype(bool)
    ends = np.flatnonzero(trained[:-1] & ~trained[1:]).tolist()
    rewards = {index: reward for index, reward in episode.token_rewards.items() if 0 <= index < len(episode.token_ids)}
    for number, reward in enumerate(episode.turn_rewards):
        if ends:  # turns that follow each other without a reply have one end
            index = ends[min(number, len(ends) - 1)]
            rewards[index] = rewards.get(index, 0.0) + reward
    return rewards


@dataclass(frozen=True)
class SavedSample:
    """The tokens of a sample that are known, from its start. All of them were sampled, unless `episode` is set."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: tuple[VersionSegment, ...] = ()
    server_ids: tuple[str, ...] = ()
    """Servers that sampled it, in order."""
    episode: Episode | None = None
    """Set if the sample is finished."""
    is_handed_over: bool = False
    """Whether the last server stopped in order, so that it sampled nothing after these tokens."""

    @property
    def min_version(self) -> int:
        return min(segment.policy_version for segment in self.segments)


def encode_piece(
    token_ids: Sequence[int], log_probs: Sequence[float], segments: Iterable[VersionSegment], server_id: str,
    *, is_handed_over: bool,
) -> bytes:  # fmt: skip
    """Encode sampled tokens of an unfinished sample. `segments` count from the start of the response."""
    tokens = groups_pb2.Trajectory(
        token_ids=np.asarray(token_ids, dtype="<i4").tobytes(),
        log_probs=np.asarray(log_probs, dtype="<f4").tobytes(),
        segments=[
            groups_pb2.VersionSegment(start=s.start, end=s.end, policy_version=s.policy_version) for s in segments
        ],
    )
    return encode_saved(groups_pb2.SavedTokens(tokens=tokens, server_id=server_id, is_handed_over=is_handed_over))


def encode_episode(episode: Episode, server_id: str) -> bytes:
    """Encode a finished sample as its only piece."""
    trajectory = Trajectory(
        token_ids=episode.token_ids,
        loss_mask=episode.loss_mask,
        log_probs=episode.log_probs,
        segments=episode.segments,
        reward=0.0,
        finish_reason=episode.finish_reason,
        reward_parts=episode.reward_parts,
        token_rewards=tuple(TokenReward(index, reward) for index, reward in sorted(episode.token_rewards.items())),
        routed_experts=episode.routed_experts,
        server_ids=episode.server_ids or (server_id,),
    )
    saved = groups_pb2.SavedTokens(
        tokens=trajectory_to_proto(trajectory), server_id=server_id, is_finished=True, num_turns=episode.num_turns,
        last_turn_start=episode.last_turn_start, num_user_turns=episode.num_user_turns,
        tool_rewards=episode.tool_rewards, turn_scores=episode.turn_scores, turn_rewards=episode.turn_rewards,
        final_reward=episode.final_reward,
    )  # fmt: skip
    return encode_saved(saved)


def read_samples(pieces: Iterable[SavedTokens]) -> dict[int, SavedSample]:
    """The samples that were saved, by number. What does not follow from the start on, or is damaged, is left out."""
    by_sample: dict[int, list[SavedTokens]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.sample, piece.start)):
        by_sample.setdefault(piece.sample, []).append(piece)
    samples = {number: _joined(of_sample) for number, of_sample in by_sample.items()}
    return {number: sample for number, sample in samples.items() if sample.token_ids}


def _joined(pieces: Sequence[SavedTokens]) -> SavedSample:
    """A finished sample replaces what was saved before it was finished. It begins at 0, as the first piece does."""
    sample = SavedSample()
    for piece in pieces:
        try:
            saved = decode_saved(piece.payload)
            tokens = trajectory_from_proto(saved.tokens)
        except PoisonGroup:
            break
        if saved.is_finished:
            return _finished(saved, tokens)
        if piece.start != len(sample.token_ids) or not _fits(piece.start, tokens):
            break
        sample = replace(
            sample,
            token_ids=sample.token_ids + tokens.token_ids.tolist(),
            log_probs=sample.log_probs + tokens.log_probs.tolist(),
            segments=sample.segments + tokens.segments,
            server_ids=tuple(dict.fromkeys((*sample.server_ids, saved.server_id))),
            is_handed_over=saved.is_handed_over,
        )
    return sample


def _fits(start: int, tokens: Trajectory) -> bool:
    """Whether the arrays are of equal length and the segments cover them."""
    covered = start
    for segment in tokens.segments:
        if segment.start != covered or segment.end <= segment.start:
            return False
        covered = segment.end
    return covered == start + len(tokens.token_ids) and len(tokens.log_probs) == len(tokens.token_ids)


def _finished(saved: groups_pb2.SavedTokens, tokens: Trajectory) -> SavedSample:
    finish_reason: FinishReason = tokens.finish_reason
    episode = Episode(
        token_ids=tokens.token_ids,
        loss_mask=tokens.loss_mask,
        log_probs=tokens.log_probs,
        segments=tokens.segments,
        finish_reason=finish_reason,
        num_turns=saved.num_turns,
        last_turn_start=saved.last_turn_start,
        num_user_turns=saved.num_user_turns,
        tool_rewards=tuple(saved.tool_rewards),
        turn_scores=tuple(saved.turn_scores),
        turn_rewards=tuple(saved.turn_rewards),
        token_rewards={given.index: given.reward for given in tokens.token_rewards},
        final_reward=saved.final_reward if saved.HasField("final_reward") else None,
        reward_parts=tokens.reward_parts,
        routed_experts=tokens.routed_experts,
        server_ids=tokens.server_ids,
    )
    return SavedSample(
        tokens.token_ids.tolist(), tokens.log_probs.tolist(), tokens.segments, tokens.server_ids, episode, True
    )
