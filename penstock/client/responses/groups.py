"""Prompts, the groups and samples that were made from them, and tasks for workers."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from penstock.client.responses.body import Metrics, ResponseBody


class Message(ResponseBody):
    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_serializer(mode="wrap")
    def _as_sent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields that the message has, as the gateway sends them."""
        return {name: value for name, value in serialize(self).items() if value or name in ("role", "content")}


class Sampling(ResponseBody):
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


class SubmittedPrompt(ResponseBody):
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    sampling: Sampling
    num_samples: int
    agent_name: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    priority: int
    evaluation_id: str


class PromptRecord(ResponseBody):
    """A prompt and its state in the queue."""

    prompt_id: int
    state: str
    attempt: int
    prompt: SubmittedPrompt | None
    """None once the prompt is trained."""


class PromptPage(ResponseBody):
    prompts: tuple[PromptRecord, ...]
    next_page_token: str


class GroupSummary(ResponseBody):
    """A group without its trajectories."""

    prompt_id: int
    attempt: int
    server_id: str
    data_source: str
    num_trajectories: int
    num_tokens: int
    mean_reward: float | None
    min_version: int
    max_version: int
    finished_at_ms: int
    is_taken: bool = False
    """Whether the learner has taken it. It stays queued until a checkpoint covers its training."""


class GroupPage(ResponseBody):
    groups: tuple[GroupSummary, ...]
    next_page_token: str


class Sample(ResponseBody):
    """A trained response: see penstock.samples.sample for its fields."""

    step: int
    policy_version: int
    prompt_id: int
    sample: int
    data_source: str
    prompt: str
    ground_truth: Any
    response: str
    reward: float | None
    reward_parts: Metrics
    num_tokens: int
    min_version: int
    max_version: int
    finish_reason: str
    is_baseline: bool
    server_id: str
    agent_name: str
    attempt: int
    finished_at_ms: int
    reward_failed: bool = False


class SamplePage(ResponseBody):
    samples: tuple[Sample, ...]
    next_page_token: str


class SamplingSegment(ResponseBody):
    """Tokens [start, end) were sampled with these parameters."""

    start: int
    end: int
    temperature: float
    top_p: float


class Trajectory(ResponseBody):
    """One sample of a group. `token_ids`, `loss_mask`, `log_probs` and `policy_versions` have one entry per token."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    reward: float
    reward_parts: Metrics
    reward_failed: bool = False
    """Whether the reward function failed, so that `reward` is `rollout.reward.error_value`."""
    finish_reason: str
    is_baseline: bool
    text: str
    tokens: tuple[str, ...]
    """Text of each token. It is empty, like `text`, if the gateway has no tokenizer."""
    learner_log_probs: tuple[float, ...]
    """Log-probs that the learner recomputed; empty until it has."""
    sampling_segments: tuple[SamplingSegment, ...] = ()
    """Covers all tokens if calls with different parameters sampled them. Empty if the group's sampling holds."""


class Group(ResponseBody):
    """All samples of one prompt."""

    run: str
    prompt_id: int
    attempt: int
    server_id: str
    data_source: str
    agent_name: str
    sampling: Sampling
    prompt_token_ids: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    finished_at_ms: int


class Result(ResponseBody):
    """A finished prompt. Pass its `cursor` to `results` to continue after it."""

    cursor: str
    prompt_id: int
    state: str
    reason: str
    attempt: int
    group: Group | None


class LeasedTask(ResponseBody):
    """A place of a task that a worker may work on. Send `session_id` as X-Penstock-Session with its calls."""

    task_id: str
    session_id: str
    attempt: int
    payload: Any
    lease_s: float


class Task(ResponseBody):
    """A task of workers: PENDING, OPEN, COMPLETE, FINISHED or FAILED."""

    task_id: str
    state: str
    num_sessions: int
    num_rewarded: int
    num_failed: int
    payload: Any
    data_source: str
    session_ids: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    failure: str
