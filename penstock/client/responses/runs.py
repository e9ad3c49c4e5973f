"""A run: its queue, servers, processes and policies."""

from __future__ import annotations

from penstock.client.responses.body import Metrics, ResponseBody

FIRST_BATCH = "waiting for the first batch"
"""Phase of a learner that is ready to train."""
LAST_VALIDATION = "waiting for the validation of the last policy"
"""The last phase of a learner, after its last step."""
READY_PHASES = ("serving", "training", LAST_VALIDATION)
"""Phases of a process that has started."""


class QueueStat(ResponseBody):
    """Counts of the replay queue. Fields without a description count since the run began."""

    pending_prompts: int
    """Prompts that wait for a lease."""
    admitted: int
    in_flight: int
    """Prompts that rollout servers work on."""
    queued: int
    """Groups in the queue, including those that the learner has taken since its last checkpoint."""
    delivered: int
    """The part of `queued` that the learner has taken."""
    queued_bytes: int
    trained: int
    expired: int
    dead_lettered: int
    conservation_error: int
    """Admitted prompts that are in no place of the queue. 0 in a healthy run."""
    redelivered: int
    reclaimed: int
    """Leases that expired, whose prompts were leased again."""
    discarded: int
    """The part of `expired` whose prompts are not admitted again."""
    admission_limit: int
    """Upper bound on trained + queued + in-flight groups."""
    admission_room: int
    """Prompts that may be admitted now."""
    inserted: int
    """Groups that rollout servers have appended."""
    saved_bytes: int = 0
    """Bytes of the saved tokens of samples whose groups are not finished."""


class Server(ResponseBody):
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


class Notice(ResponseBody):
    """What the processes of a run want its users to know. Equal events are one notice with a count."""

    kind: str
    """reward_failed, default_reward, prompt_failed, process_restarted, server_failed or server_lost."""
    text: str
    """One line about the first of the events."""
    detail: str
    """More about the first event, such as a traceback; may be empty."""
    count: int
    first_at_ms: int
    last_at_ms: int


class Phase(ResponseBody):
    name: str
    entered_at_ms: int


class Part(ResponseBody):
    """A process of a run, and the phases of its start, oldest first."""

    component: str
    """`learner`, or the id of a rollout server."""
    phases: tuple[Phase, ...]

    @property
    def is_starting(self) -> bool:
        return self.phases[-1].name not in READY_PHASES


class Verdict(ResponseBody):
    """One judgement about a run."""

    code: str
    """The cause in one word: one of LEARNING_CODES or SPEED_CODES in penstock.diagnosis.progress."""
    level: str
    """OK, WARN or FAIL."""
    text: str
    """The judgement, with the numbers behind it."""
    advice: str
    """What to do about it; empty if there is nothing to do."""


class Run(ResponseBody):
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
    """Version at which a roll back holds all servers."""
    launcher_id: str
    """Launcher of a created run; empty for a gateway's own run."""
    detail: str
    """Why the run is in its state, if there is more to say."""
    num_trained: int | None = None
    """Groups that were trained, including those that no checkpoint covers yet. None from an older gateway."""
    learning: str = ""
    """Whether the reward rises, and if not, the most likely cause."""
    speed: str = ""
    """What the run waits for most."""
    learning_verdict: Verdict | None = None
    """The parts of `learning`. None for a created run that is not up, and from an older gateway."""
    speed_verdict: Verdict | None = None
    """The parts of `speed`."""
    parts: tuple[Part, ...] = ()
    """How far the learner and the rollout servers are with their start."""
    notices: tuple[Notice, ...] = ()
    """Newest first."""

    @property
    def roll_back_text(self) -> str:
        """What a roll back means, and what ends it. Empty if there is none."""
        if self.held_version is None:
            return ""
        return (
            f"a roll back holds the servers at version {self.held_version}, so staleness grows with each step; "
            "`penstock policies release` ends it"
        )


class StepMetrics(ResponseBody):
    """The metrics of one step, and the version that it made."""

    step: int
    policy_version: int
    published_at_ms: int
    metrics: Metrics


class Policy(ResponseBody):
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


class PolicyPage(ResponseBody):
    policies: tuple[Policy, ...]
    next_page_token: str


class PolicyComparison(ResponseBody):
    """Two versions, and the change of each metric from the first to the second."""

    policy: Policy
    other: Policy
    metric_changes: Metrics
    steps_between: int
    same_weights: bool
