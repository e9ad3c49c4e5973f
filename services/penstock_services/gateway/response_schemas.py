"""What each operation answers, for the OpenAPI document. Answers are not checked against it when they are sent.

Most are the classes that the Python clients return.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from penstock.api.records import (
    Group,
    GroupPage,
    LeasedTask,
    Policy,
    PolicyComparison,
    PolicyPage,
    PromptPage,
    PromptRecord,
    Record,
    Result,
    RewardedSession,
    Run,
    SamplePage,
    Server,
    Session,
    SessionPage,
    StepMetrics,
    Task,
)


class Submission(Record):
    prompt_ids: tuple[int, ...]
    replayed: bool
    """Whether these are the ids of an earlier request with the same idempotency key."""
    num_replayed: int
    """How many of the prompts were submitted before."""


class Evaluation(Record):
    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int
    pass_at: dict[str, float]
    """pass@k by k, over the prompts finished so far."""
    num_failed: int


class CancelledPrompts(Record):
    prompts: tuple[PromptRecord, ...]


class RunList(Record):
    runs: tuple[Run, ...]


class ServerList(Record):
    servers: tuple[Server, ...]


class Score(Record):
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
    buried_at_ms: int
    prompt_bytes: int
    group_bytes: int


class DeadLetterPage(Record):
    dead_letters: tuple[DeadLetter, ...]
    next_page_token: str
    reasons: dict[str, int]


class RequeuedPrompt(Record):
    prompt_id: int


class Unpinned(Record):
    was_pinned: bool


class Dataset(Record):
    name: str
    format: str
    num_prompts: int
    num_submitted: int
    num_bytes: int


class SubmittedTasks(Record):
    task_ids: tuple[str, ...]
    replayed: bool


class LeasedTasks(Record):
    tasks: tuple[LeasedTask, ...]


class LostTasks(Record):
    lost_session_ids: tuple[str, ...]


class ReturnedTask(Record):
    returned: bool


class Usage(Record):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Record):
    """OpenAI's completion, with the policy versions that made it. `stream: true` answers server-sent events instead."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage
    policy_version: int
    policy_versions: list[int]


class ResponsesAnswer(Record):
    """OpenAI's response, with the policy versions that made it. `stream: true` answers server-sent events instead."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    policy_version: int
    policy_versions: list[int]


class MessagesAnswer(Record):
    """Anthropic's message, with the policy versions that made it. `stream: true` answers server-sent events instead."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, int]
    policy_version: int
    policy_versions: list[int]


class TokenCount(Record):
    input_tokens: int


class Model(Record):
    id: str
    object: str
    created: int
    owned_by: str
    policy_version: int | None
    server_ids: tuple[str, ...]


class ModelList(Record):
    object: str
    data: tuple[Model, ...]


class Alive(Record):
    status: str


class Ready(Record):
    status: str
    state: str
    detail: str
    warnings: tuple[str, ...]


JSON_ANSWERS: dict[str, type[BaseModel]] = {
    "submit_prompts": Submission,
    "list_prompts": PromptPage,
    "cancel_prompts": CancelledPrompts,
    "wait_prompt": PromptRecord,
    "get_prompt": PromptRecord,
    "list_groups": GroupPage,
    "get_group": Group,
    "list_samples": SamplePage,
    "list_policies": PolicyPage,
    "compare_policies": PolicyComparison,
    "release_policy": Policy,
    "promote_policy": Policy,
    "roll_back_policy": Policy,
    "retire_policy": Policy,
    "get_policy": Policy,
    "pin_policy": Policy,
    "unpin_policy": Unpinned,
    "list_runs": RunList,
    "pause_run": Run,
    "resume_run": Run,
    "stop_run": Run,
    "get_run": Run,
    "list_metrics": MetricsList,
    "list_servers": ServerList,
    "drain_server": Server,
    "undrain_server": Server,
    "create_evaluation": Evaluation,
    "get_evaluation": Evaluation,
    "list_dead_letters": DeadLetterPage,
    "requeue_dead_letter": RequeuedPrompt,
    "submit_dataset": Dataset,
    "upload_dataset": Dataset,
    "get_dataset": Dataset,
    "complete_chat": Completion,
    "complete": Completion,
    "create_response": ResponsesAnswer,
    "create_message": MessagesAnswer,
    "count_tokens": TokenCount,
    "list_models": ModelList,
    "get_model": Model,
    "reward_session": RewardedSession,
    "list_sessions": SessionPage,
    "get_session": Session,
    "submit_tasks": SubmittedTasks,
    "lease_tasks": LeasedTasks,
    "heartbeat_tasks": LostTasks,
    "return_task": ReturnedTask,
    "get_task": Task,
    "healthz": Alive,
    "startupz": Alive,
    "readyz": Ready,
}
"""The JSON of a successful answer, by the name of the operation."""

EVENT_ANSWERS: dict[str, type[BaseModel]] = {"watch_results": Result, "watch_policies": Policy}
"""What the data of each server-sent event is, by the name of the operation."""

OTHER_ANSWERS = {
    "scrape": "text/plain",
    "index": "text/html",
    "file": "*/*",
    "api_page": "text/html",
    "api_file": "*/*",
}
"""Media types of answers that are files."""


def success_of(operation: str) -> dict[str, Any]:
    """The documentation of an operation's successful answer."""
    if operation in JSON_ANSWERS:
        return {"model": JSON_ANSWERS[operation], "description": "Success."}
    if operation in EVENT_ANSWERS:
        name = EVENT_ANSWERS[operation].__name__
        content = {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        return {"description": f"Server-sent events. The data of each is a {name} as JSON.", "content": content}
    return {"description": "Success.", "content": {OTHER_ANSWERS[operation]: {"schema": {"type": "string"}}}}
