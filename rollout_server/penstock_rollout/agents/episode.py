"""The result of an agent loop: a trajectory that has not been scored yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import ExpertIds, FinishReason, TokenReward, VersionSegment
from penstock_rollout.rewards.function import PlacedScore, place_scores

RewardUse = Literal["sum", "replace", "last", "record"]
"""`rollout.agents.turn_rewards`."""
Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""
SHARED_FIELDS = ("token_ids", "loss_mask", "log_probs", "segments", "finish_reason", "routed_experts")
"""Fields that an episode has in common with its trajectory."""
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
    def trajectory_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SHARED_FIELDS}

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == "aborted" or not len(self.token_ids)

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
    """The parts of the reward of `combine_rewards` that belong to single tokens: the agent's rewards of tokens, its
    rewards of turns at the last token of each turn, and `scored`, the rewards of the reward function by token. If the
    agent gives rewards itself, there are none with `last`, `replace` omits the function's, and `record` the agent's."""
    own: dict[int, float] = {}
    if how in ("sum", "replace"):
        num_tokens = len(episode.token_ids)
        own = {index: reward for index, reward in episode.token_rewards.items() if 0 <= index < num_tokens}
        turns = [PlacedScore("turn", number, reward) for number, reward in enumerate(episode.turn_rewards)]
        if episode.loss_mask.any():  # turns that follow each other without a reply have one end
            for index, reward in place_scores(turns, episode.loss_mask.tolist(), 0, int).items():
                own[index] = own.get(index, 0.0) + reward
    if has_own_rewards(episode) and how in ("last", "replace"):
        scored = NONE
    rewards = {index: own.get(index, 0.0) + scored.get(index, 0.0) for index in own.keys() | scored.keys()}
    return tuple(TokenReward(index, reward) for index, reward in sorted(rewards.items()) if reward)
