"""What an agent loop returns: a trajectory before its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import FinishReason, VersionSegment

Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""


@dataclass(frozen=True)
class Episode:
    """Arrays as in penstock.trajectory.Trajectory. `Transcript.episode` makes one that keeps every invariant."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason
    """`stop`: the model or its environment ended it. `length`: a limit on tokens or turns did."""
    num_turns: int = 1
    """Assistant turns."""
    last_turn_start: int = 0
    """Where the last assistant turn begins."""
    turn_rewards: tuple[float, ...] = ()
    """One for each assistant turn; empty where the agent gives no rewards of its own."""
    final_reward: float | None = None
    """What the environment gave at the end, beside the turns' rewards."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers of the agent's own, to be recorded."""


def combine_rewards(scored: Scored, episode: Episode, how: Literal["sum", "replace", "last"]) -> Scored:
    """The trajectory's reward of the reward function's and the agent's; an agent without rewards leaves it as it is."""
    reward, parts = scored
    own = [*episode.turn_rewards, *([] if episode.final_reward is None else [episode.final_reward])]
    named = {f"turn_{number}": turn for number, turn in enumerate(episode.turn_rewards, start=1)}
    if episode.final_reward is not None:
        named["final"] = episode.final_reward
    if not own:
        return reward, parts | episode.reward_parts
    total = {"sum": reward + sum(own), "replace": sum(own), "last": own[-1]}[how]
    return total, {"score": reward} | parts | named | episode.reward_parts
