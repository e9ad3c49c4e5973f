"""The bodies of a gateway's responses, as the clients return them.

Fields that a newer gateway adds are ignored, so that gateways and clients can be upgraded in any order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, TypeAdapter

from penstock.errors import PenstockError

T = TypeVar("T")


def read_response(response: httpx.Response, kind: type[T], part: str = "") -> T:
    """Return the body as `kind`, or the field of it that is named `part`."""
    try:
        body = response.json()
        return TypeAdapter(kind).validate_python(body[part] if part else body)
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{response.url} did not answer as a gateway does ({error}); check the URL") from error


class ResponseBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Metrics = dict[str, float | None]
"""Values by metric name. None stands for NaN or infinity, which JSON has no number for."""


class QueueStat(ResponseBody):
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


class Server(ResponseBody):
    server_id: str
    address: str
    state: str
    policy_version: int
    heartbeat_age_ms: int
    running_groups: int
    engine: str
    weights_digest: str
    is_drained: bool


class Run(ResponseBody):
    run: str
    step: int
    policy_version: int
    term: int
    queue: QueueStat
    metrics: Metrics
    """Metrics of the step that made the newest version."""
    servers: tuple[Server, ...]
    state: str
    held_version: int | None
    launcher_id: str
    detail: str


class StepMetrics(ResponseBody):
    step: int
    policy_version: int
    published_at_ms: int
    metrics: Metrics


class Policy(ResponseBody):
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


class PolicyPage(ResponseBody):
    policies: tuple[Policy, ...]
    next_page_token: str


class PolicyComparison(ResponseBody):
    policy: Policy
    other: Policy
    metric_changes: Metrics
    steps_between: int
    same_weights: bool


class Message(ResponseBody):
    role: str
    content: str


class Sampling(ResponseBody):
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None


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
    prompt_id: int
    state: str
    attempt: int
    prompt: SubmittedPrompt | None
    """None once the prompt is trained."""


class PromptPage(ResponseBody):
    prompts: tuple[PromptRecord, ...]
    next_page_token: str


class GroupSummary(ResponseBody):
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


class GroupPage(ResponseBody):
    groups: tuple[GroupSummary, ...]
    next_page_token: str


class Trajectory(ResponseBody):
    """One sample of a group. `token_ids`, `loss_mask`, `log_probs` and `policy_versions` have one entry per token."""

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
    """Text of each token. It is empty, like `text`, if the gateway has no tokenizer."""
    learner_log_probs: tuple[float, ...]
    """Log-probs that the learner recomputed; empty until it has."""


class Group(ResponseBody):
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
