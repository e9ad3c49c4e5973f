"""The records that gateways and clients exchange: prompts, groups, policies, runs, sessions and tasks.

Fields that a newer gateway adds are ignored, and a field that is added here needs a default, which an older gateway
leaves. So gateways and clients can be upgraded in any order.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from penstock import samples, sampling, trajectory
from penstock.replay import queue_types
from penstock.store import reports

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PromptId = Annotated[int, Field(ge=1, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

Metrics = dict[str, float | None]
"""Values by metric name. None stands for NaN or infinity, which JSON has no number for."""


class Record(BaseModel):
    """A gateway refuses unknown fields of a request nevertheless."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Problem(Record):
    """An error, as an RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    """One line that says what happened and what to do."""
    reason: str
    """Machine-readable and stable."""
    field: str
    """Path of the wrong field, or empty."""
    error: dict[str, Any] = Field(default_factory=dict)
    """The same in the form of OpenAI's API: message, type, param and code."""


class Page(Record):
    """A request for one page of a list."""

    page_size: Int32 = 0
    page_token: str = ""


class PageAnswer(Record):
    """One page of a list."""

    next_page_token: str
    """Asks for the next page. It is empty if this page is the last one."""


class Message(Record):
    """A message in OpenAI's format. The fields after `content` reach the model's chat template."""

    role: str
    content: str | None
    """Null only in a request, alongside `tool_calls`."""
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_serializer(mode="wrap")
    def _as_sent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields that the message has, as the gateway sends them."""
        return {name: value for name, value in serialize(self).items() if value or name in ("role", "content")}


class Sampling(Record, sampling.Sampling):  # type: ignore[misc]  # mypy does not know that it is frozen
    """The parameters of penstock.sampling."""


class SubmittedPrompt(Record):
    """A prompt as clients submit it, and as they read it back."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[TokenId, ...] = ()
    sampling: Sampling = Sampling()
    num_samples: Int32 = 1
    agent_name: str = ""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = Field(default_factory=dict)  # pydantic deep-copies a `{}` for each prompt
    priority: Int32 = 0
    evaluation_id: str = ""
    """Set by the gateway for the prompts of an evaluation."""


class Submission(Record, queue_types.Submission):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Answer to a submission of prompts."""


class PromptRecord(Record):
    """A prompt and its state in the queue."""

    prompt_id: int
    state: str
    attempt: int
    prompt: SubmittedPrompt | None
    """None once the prompt is trained."""


class CancelledPrompts(Record):
    prompts: tuple[PromptRecord, ...]


class PromptPage(PageAnswer):
    prompts: tuple[PromptRecord, ...]


class GroupSummary(Record):
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


class GroupPage(PageAnswer):
    groups: tuple[GroupSummary, ...]


class Sample(Record, samples.Sample):  # type: ignore[misc]  # mypy does not know that it is frozen
    """A response that was trained, or scored in a validation."""


class SamplePage(PageAnswer):
    samples: tuple[Sample, ...]


class SamplingSegment(Record, trajectory.SamplingSegment):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Tokens [start, end) were sampled with these parameters."""


class Trajectory(Record):
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


class Group(Record):
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


class Result(Record):
    """A finished prompt. Pass its `cursor` to `results` to continue after it."""

    cursor: str
    prompt_id: int
    state: str
    reason: str
    attempt: int
    group: Group | None


class Evaluation(Record, queue_types.EvaluationProgress):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Progress and scores of an evaluation."""

    pass_at: dict[int, float] = Field(default_factory=dict)


class Dataset(Record):
    name: str
    format: str
    num_prompts: int
    num_submitted: int
    num_bytes: int


class LeasedTask(Record):
    """A place of a task that a worker may work on. Send `session_id` as X-Penstock-Session with its calls."""

    task_id: str
    session_id: str
    attempt: int
    payload: Any
    lease_s: float


class LeasedTasks(Record):
    tasks: tuple[LeasedTask, ...]


class SubmittedTasks(Record):
    task_ids: tuple[str, ...]
    replayed: bool


class LostTasks(Record):
    lost_session_ids: tuple[str, ...]


class ReturnedTask(Record):
    returned: bool


class Task(Record):
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


class QueueStat(Record, queue_types.QueueCounts):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Counts of the replay queue."""

    conservation_error: int
    """Admitted prompts that are in no place of the queue. 0 in a healthy run."""


class Server(Record):
    """A rollout server, as its last heartbeat described it."""

    server_id: str
    address: str
    state: str
    policy_version: int
    heartbeat_age_ms: int
    running_groups: int
    engine: str
    weights_digest: str
    is_drained: bool
    breaker_reason: str = ""
    """Reason of the newest failure while the server leases nothing because everything that it tried failed."""
    breaker_failures: int = 0
    """Leases that failed since the server's last success, while `breaker_reason` is set."""
    is_quarantined: bool = False
    """Whether its groups are not trained because its log-probs disagree with the learner's."""
    logprob_mismatch_nats: float = 0.0
    """Mean difference per token, while `is_quarantined`."""
    logprob_limit_nats: float = 0.0
    """The limit that this difference exceeds, while `is_quarantined`."""
    num_reloads: int = 0
    """How often its weights were loaded again, while `is_quarantined`."""


class Notice(Record, reports.Notice):  # type: ignore[misc]  # mypy does not know that it is frozen
    """What the processes of a run want its users to know. Equal events are one notice with a count."""


class Phase(Record, reports.Phase):  # type: ignore[misc]  # mypy does not know that it is frozen
    """A phase of the start of a process, such as `loading the model`."""


class Part(Record):
    """A process of a run, and the phases of its start, oldest first."""

    component: str
    """`learner`, or the id of a rollout server."""
    phases: tuple[Phase, ...]

    @property
    def is_starting(self) -> bool:
        return self.phases[-1].name not in reports.READY_PHASES


class Finding(Record):
    """One judgement about a run or a deployment, in one line."""

    check: str = ""
    """What was examined, for example `redis`, `learning` or `ports`. Empty from an older gateway."""
    level: str
    """OK, WARN or FAIL."""
    text: str
    """The judgement, with the numbers behind it."""
    advice: str
    """What to do about it; empty if there is nothing to do."""
    code: str
    """The cause in one word: one of LEARNING_CODES or SPEED_CODES in penstock.diagnosis.progress, or empty."""

    @property
    def line(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text


class Run(Record):
    """A run: its progress, queue and servers."""

    run: str
    step: int
    policy_version: int
    term: int
    queue: QueueStat
    metrics: Metrics
    """Metrics of the newest step. Empty before the first one."""
    servers: tuple[Server, ...]
    state: str
    """One of penstock.diagnosis.facts.RUN_STATES."""
    held_version: int | None
    """Version at which a rewind holds all servers."""
    detail: str
    """Why the run is in its state, if there is more to say."""
    num_trained: int | None = None
    """Groups that were trained, including groups that no checkpoint covers yet. None from an older gateway."""
    learning: str = ""
    """Whether the reward rises, and if not, the most likely cause."""
    speed: str = ""
    """What the run waits for most."""
    learning_finding: Finding | None = None
    """The parts of `learning`. None from an older gateway."""
    speed_finding: Finding | None = None
    """The parts of `speed`."""
    parts: tuple[Part, ...] = ()
    """How far the learner and the rollout servers are with their start."""
    notices: tuple[Notice, ...] = ()
    """Newest first."""

    @property
    def rewind_text(self) -> str:
        """What a rewind means, and what ends it. Empty if there is none."""
        if self.held_version is None:
            return ""
        return (
            f"a rewind holds the servers at version {self.held_version}, so staleness grows with each step; "
            "`penstock policies release` ends it"
        )


class RunList(Record):
    runs: tuple[Run, ...]


class ServerList(Record):
    servers: tuple[Server, ...]


class StepMetrics(Record):
    """The metrics of one step, and the version that it made."""

    step: int
    policy_version: int
    published_at_ms: int
    metrics: Metrics


class Score(Record):
    """The score of evaluation BENCHMARK-NUMBER."""

    benchmark: str
    number: int
    score: float | None


class MetricsList(Record):
    steps: tuple[StepMetrics, ...]
    scores: tuple[Score, ...]


class DeadLetter(Record):
    letter_id: str
    prompt_id: int
    reason: str
    dead_lettered_at_ms: int
    prompt_bytes: int
    group_bytes: int


class DeadLetterPage(PageAnswer):
    dead_letters: tuple[DeadLetter, ...]
    reasons: dict[str, int]


class RequeuedPrompt(Record):
    prompt_id: int


class Policy(Record):
    """A policy version in the registry."""

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


class PolicyPage(PageAnswer):
    policies: tuple[Policy, ...]


class Unpinned(Record):
    was_pinned: bool


class PolicyComparison(Record):
    """Two versions, and the change of each metric from the first to the second."""

    policy: Policy
    other: Policy
    metric_changes: Metrics
    steps_between: int
    same_weights: bool


class SessionSummary(Record):
    """A session without its calls: OPEN, then REWARDED while it waits for its task or the queue, then FINISHED."""

    session_id: str
    state: str
    reward: float | None
    """None while it is open."""
    reward_parts: Metrics
    task_id: str
    """Empty if it belongs to no task."""
    num_calls: int
    num_bytes: int
    prompt_ids: tuple[int, ...]
    """Prompts of the groups that it became."""


class SessionPage(PageAnswer):
    sessions: tuple[SessionSummary, ...]


class SessionNode(Record):
    """A call of a session. Where the request's bound is reached, its tokens are cut or omitted: compare their number
    with `num_inserted` and `num_sampled`."""

    number: int
    parent: int | None
    """The call that this one continues, token by token. None if a path begins here."""
    server_id: str
    finish_reason: str
    sampling: Sampling
    finished_at_ms: int
    num_prompt_tokens: int
    num_inserted: int
    num_sampled: int
    inserted_token_ids: tuple[int, ...]
    """The part of the prompt that comes after the parent's tokens, such as messages and replies of tools."""
    inserted_tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    """What the engine sampled; so are `log_probs` and `policy_versions`."""
    tokens: tuple[str, ...]
    """Text of each token. It is empty, like `inserted_tokens`, if the gateway has no tokenizer."""
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]


class SessionPath(Record):
    """From a call that continues none to one that none continues. Each path is one trajectory."""

    calls: tuple[int, ...]
    trained_calls: tuple[int, ...]
    """Calls that are trained in this path. The others are trained in an earlier one."""
    num_trained_tokens: int
    reward: float | None


class Session(SessionSummary):
    """A session as a tree of its calls, in the order in which they were recorded."""

    calls: tuple[SessionNode, ...]
    paths: tuple[SessionPath, ...]


class RewardedSession(Record):
    """What a reward did. `is_waiting`: the session waits for the other sessions of its task."""

    prompt_ids: tuple[int, ...]
    replayed: bool
    is_waiting: bool
