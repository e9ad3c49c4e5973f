"""Plain data types of the training path: frozen dataclasses with numpy arrays. penstock.codec converts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.sampling import Distribution
from penstock.sampling import Sampling as Sampling  # noqa: PLC0414  users import it from here

MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message besides role and content that reach the model's chat template."""
FinishReason = Literal["stop", "length", "aborted"]
ExpertIds = NDArray[Any]
"""[tokens, layers, top_k] of uint8, or of uint16 with more than 256 experts."""


SESSION_AGENT = "penstock_session"
"""Agent of the groups that a gateway makes of sessions, and of their prompts. Only the harness could sample them again:
a rollout server refuses such a prompt, and a group that may not be trained is dropped for good."""


@dataclass(frozen=True)
class Prompt:
    """A client's request for samples. Exactly one of `messages` and `token_ids` is given."""

    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) pairs, rendered with the model's chat template."""
    message_fields: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Further fields (MESSAGE_FIELDS) of the messages that have some, by the number of the message."""
    token_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    num_samples: int = 1
    agent_name: str = ""
    """Name of the agent loop. Empty: `rollout.agents.default_agent`."""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    evaluation_id: str = ""
    """Evaluation of a held-out prompt, whose samples are scored and never trained. Empty for a training prompt."""
    trace_parent: str = ""
    """W3C trace context; empty if the prompt is not traced."""
    owner: str = ""
    """Team of the API key that submitted it; empty if the run did."""

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them, with all their fields."""
        return [
            {"role": role, "content": content, **self.message_fields.get(number, {})}
            for number, (role, content) in enumerate(self.messages)
        ]


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, end) of a trajectory."""

    start: int
    end: int


@dataclass(frozen=True)
class VersionSegment(TokenRange):
    """Tokens that `policy_version` produced."""

    policy_version: int


@dataclass(frozen=True)
class SamplingSegment(Distribution, TokenRange):
    """Tokens that were sampled from this distribution, or inserted next to such tokens."""


def temperature_of_log_probs(temperature: float) -> float:
    """The temperature at which engines report the log-probs of tokens sampled at `temperature`: 1 for greedy ones."""
    return temperature or 1.0


@dataclass(frozen=True)
class TokenReward:
    """The reward of one token of the response."""

    index: int
    reward: float


@dataclass(frozen=True)
class Trajectory:
    """One sample. All arrays have one entry per response token, and `segments` covers them without gaps or overlaps."""

    token_ids: NDArray[np.int32]
    """The ids as they were sampled, or inserted by the environment. Never re-tokenized text."""
    loss_mask: NDArray[np.uint8]
    """1 for tokens that the model produced and that are trained, 0 for tool output."""
    log_probs: NDArray[np.float32]
    """Log-probs under the distribution that was sampled from, after temperature and top-p."""
    segments: tuple[VersionSegment, ...]
    reward: float
    finish_reason: FinishReason = "stop"
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_failed: bool = False
    """Whether the reward function failed, so that `reward` is `rollout.reward.error_value`."""
    answer: str | None = None
    """The answer that the reward function has read from the response, for the majority vote of a validation; None if
    it does not say. It is not stored with the group."""
    is_baseline: bool = False
    """Whether this is the greedy sample that the others of its group are compared with (remax). It is never trained."""
    sampling_segments: tuple[SamplingSegment, ...] = ()
    """Covers all tokens if they were sampled by calls with different parameters. Empty if the group's sampling holds
    for all of them."""
    episode: int = 0
    """Trajectories of a group with the same episode have one outcome, such as the paths of a session. They count as one
    sample in the statistics of the group. 0 if the trajectory is a separate sample."""
    token_rewards: tuple[TokenReward, ...] = ()
    """Rewards of single tokens, such as those of turns, in ascending order. They are part of `reward`; the rest of it
    belongs to the last trained token."""
    server_ids: tuple[str, ...] = ()
    """Servers that sampled it, in order, if another server than the group's sampled a part of it. Empty if the group's
    server sampled it all."""
    routed_experts: ExpertIds | None = None
    """[tokens, layers, top_k] ids of the experts that the engine chose, for all tokens of prompt and response but the
    last, which no forward pass has read. Zeros in layers without experts. None if the engine reported none."""

    @property
    def min_version(self) -> int:
        return min([segment.policy_version for segment in self.segments])

    @property
    def max_version(self) -> int:
        return max([segment.policy_version for segment in self.segments])

    @property
    def has_trained_token(self) -> bool:
        return any(self.loss_mask.tobytes())

    def token_versions(self) -> NDArray[np.int64]:
        versions = np.empty(len(self.token_ids), dtype=np.int64)
        for segment in self.segments:
            versions[segment.start : segment.end] = segment.policy_version
        return versions

    def token_temperatures(self, sampling: Sampling) -> NDArray[np.float32]:
        """The temperature at which the log-prob of every token was taken. `sampling` is the group's."""
        whole = temperature_of_log_probs(sampling.temperature)
        temperatures = np.full(len(self.token_ids), whole, dtype=np.float32)
        for segment in self.sampling_segments:
            temperatures[segment.start : segment.end] = temperature_of_log_probs(segment.temperature)
        return temperatures

    def kept_probability(self, sampling: Sampling) -> float:
        """The smallest `kept_probability` that a token was sampled with. `sampling` is the group's."""
        return min(each.kept_probability for each in self.sampling_segments or (sampling,))


@dataclass(frozen=True)
class Group:
    """All samples of one prompt. Groups are what is delivered, acknowledged and recorded in the ledger."""

    run: str
    prompt_id: int
    attempt: int
    """Number of the lease that made the group, from 1. (run, prompt_id, attempt) identifies the group."""
    server_id: str
    data_source: str
    sampling: Sampling
    prompt_token_ids: NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    agent_name: str = "single_turn_agent"
    finished_at_ms: int = 0
    trace_parent: str = ""
    """W3C trace context of the lease; empty if the group is not traced."""

    @cached_property
    def min_version(self) -> int:
        return min([trajectory.min_version for trajectory in self.trajectories])

    @cached_property
    def max_version(self) -> int:
        return max([trajectory.max_version for trajectory in self.trajectories])

    @property
    def num_response_tokens(self) -> int:
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the samples that are trained."""
        rewards = [trajectory.reward for trajectory in self.trajectories if not trajectory.is_baseline]
        return sum(rewards) / len(rewards)
