"""What a gateway answers, as the clients return it. A newer gateway's further fields are left out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Metrics = dict[str, float | None]
"""By name. None is a number that JSON cannot carry."""


class QueueStat(Answer):
    pending_prompts: int
    admitted: int
    in_flight: int
    queued: int
    delivered: int
    queued_bytes: int
    trained: int
    expired: int
    dead_lettered: int
    conservation_error: int
    redelivered: int
    reclaimed: int
    discarded: int
    admission_limit: int
    admission_room: int
    inserted: int


class Server(Answer):
    server_id: str
    address: str
    state: str
    policy_version: int
    heartbeat_age_ms: int
    running_groups: int
    engine: str
    weights_digest: str
    is_drained: bool


class Run(Answer):
    run: str
    step: int
    policy_version: int
    term: int
    queue: QueueStat
    metrics: Metrics
    """Of the step that made the newest version."""
    servers: tuple[Server, ...]
    state: str
    held_version: int | None
    launcher_id: str
    detail: str


class StepMetrics(Answer):
    step: int
    policy_version: int
    published_at_ms: int
    metrics: Metrics


class Policy(Answer):
    policy_version: int
    step: int
    parent_version: int | None
    published_at_ms: int
    weights_digest: str
    snapshot_path: str
    state: str
    metrics: Metrics
    server_ids: tuple[str, ...]
    is_held: bool
    pins: tuple[str, ...]


class PolicyPage(Answer):
    policies: tuple[Policy, ...]
    next_page_token: str


class PolicyComparison(Answer):
    policy: Policy
    other: Policy
    metric_changes: Metrics
    steps_between: int
    same_weights: bool


class Message(Answer):
    role: str
    content: str


class Sampling(Answer):
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None


class SubmittedPrompt(Answer):
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


class PromptRecord(Answer):
    prompt_id: int
    state: str
    attempt: int
    prompt: SubmittedPrompt | None
    """None once it is trained."""


class PromptPage(Answer):
    prompts: tuple[PromptRecord, ...]
    next_page_token: str


class GroupSummary(Answer):
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


class GroupPage(Answer):
    groups: tuple[GroupSummary, ...]
    next_page_token: str


class Trajectory(Answer):
    """The tuples of tokens have an entry for each token."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    reward: float
    reward_parts: Metrics
    finish_reason: str
    is_baseline: bool
    text: str
    tokens: tuple[str, ...]
    """Empty, as is `text`, where the gateway has no tokenizer."""
    learner_log_probs: tuple[float, ...]
    """Empty where the learner has not recomputed them."""


class Group(Answer):
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


class Result(Answer):
    """A prompt that finished. `cursor` is where to go on after it."""

    cursor: str
    prompt_id: int
    state: str
    reason: str
    attempt: int
    group: Group | None
