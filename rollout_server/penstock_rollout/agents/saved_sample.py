"""What earlier leases of a prompt saved of one sample, and its form in Redis.

A sample is saved in pieces, each with the tokens since the piece before it. The last piece of a finished sample has its
episode. Any prefix of the pieces is a valid sample, so a piece that was lost costs the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.codec import decode_saved, encode_saved, trajectory_from_proto, trajectory_to_proto
from penstock.errors import PoisonGroup
from penstock.replay.queue_types import SavedTokens
from penstock.trajectory import FinishReason, TokenReward, Trajectory, VersionSegment
from penstock.v1 import groups_pb2
from penstock_rollout.agents.episode import Episode


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
