"""The result of an agent loop: a trajectory that has not been scored yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import ExpertIds, FinishReason, VersionSegment

Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""


class SampleScore(NamedTuple):
    """What a scorer says about one response."""

    reward: float
    parts: dict[str, float]
    failed: bool = False
    """Whether the reward could not be computed, so that `reward` is `rollout.reward.error_value`."""


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
    turn_rewards: tuple[float, ...] = ()
    """One reward per assistant turn. Empty if the agent gives no rewards itself."""
    final_reward: float | None = None
    """Reward that the environment gave at the end, in addition to the rewards of the turns."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that the agent wants recorded."""
    routed_experts: ExpertIds | None = None


def combine_rewards(scored: Scored, episode: Episode, how: Literal["sum", "replace", "last"]) -> Scored:
    """Combine the score of the reward function with the agent's own rewards. Without those the score is unchanged."""
    reward, parts = scored
    own = [*episode.turn_rewards, *([] if episode.final_reward is None else [episode.final_reward])]
    named = {f"turn_{number}": turn for number, turn in enumerate(episode.turn_rewards, start=1)}
    if episode.final_reward is not None:
        named["final"] = episode.final_reward
    if not own:
        return reward, parts | episode.reward_parts
    total = {"sum": reward + sum(own), "replace": sum(own), "last": own[-1]}[how]
    return total, {"score": reward} | parts | named | episode.reward_parts
