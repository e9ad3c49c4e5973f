from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class ChangeRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListMetricsRequest(_message.Message):
    __slots__ = ("run", "page_size", "names")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class ListMetricsResponse(_message.Message):
    __slots__ = ("steps", "scores")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepMetrics]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepMetrics, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("benchmark", "number", "score")
    BENCHMARK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    benchmark: str
    number: int
    score: float
    def __init__(self, benchmark: _Optional[str] = ..., number: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "policy_version", "published_at_ms", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: int
    published_at_ms: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[int] = ..., published_at_ms: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ChangeServerRequest(_message.Message):
    __slots__ = ("run", "server_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    server_id: str
    def __init__(self, run: _Optional[str] = ..., server_id: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token", "kind")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    kind: str
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters", "next_page_token", "reasons")
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    next_page_token: str
    reasons: _containers.ScalarMap[str, int]
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., reasons: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("letter_id", "prompt_id", "reason", "dead_lettered_at_ms", "prompt_bytes", "group_bytes")
    LETTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    letter_id: str
    prompt_id: int
    reason: str
    dead_lettered_at_ms: int
    prompt_bytes: int
    group_bytes: int
    def __init__(self, letter_id: _Optional[str] = ..., prompt_id: _Optional[int] = ..., reason: _Optional[str] = ..., dead_lettered_at_ms: _Optional[int] = ..., prompt_bytes: _Optional[int] = ..., group_bytes: _Optional[int] = ...) -> None: ...

class RequeueDeadLetterRequest(_message.Message):
    __slots__ = ("run", "letter_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LETTER_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    letter_id: str
    def __init__(self, run: _Optional[str] = ..., letter_id: _Optional[str] = ...) -> None: ...

class RequeueDeadLetterResponse(_message.Message):
    __slots__ = ("prompt_id",)
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    prompt_id: int
    def __init__(self, prompt_id: _Optional[int] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run", "step", "policy_version", "term", "queue", "metrics", "servers", "state", "held_version", "detail", "notices", "num_trained", "parts", "learning", "speed", "learning_finding", "speed_finding")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Run.State]
        RUNNING: _ClassVar[Run.State]
        PAUSED: _ClassVar[Run.State]
        STOPPED: _ClassVar[Run.State]
        FINISHED: _ClassVar[Run.State]
        WAITING: _ClassVar[Run.State]
    STATE_UNSPECIFIED: Run.State
    RUNNING: Run.State
    PAUSED: Run.State
    STOPPED: Run.State
    FINISHED: Run.State
    WAITING: Run.State
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FINDING_FIELD_NUMBER: _ClassVar[int]
    SPEED_FINDING_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    policy_version: int
    term: int
    queue: QueueStat
    metrics: _containers.ScalarMap[str, float]
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    state: Run.State
    held_version: int
    detail: str
    notices: _containers.RepeatedCompositeFieldContainer[Notice]
    num_trained: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    learning: str
    speed: str
    learning_finding: Finding
    speed_finding: Finding
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., term: _Optional[int] = ..., queue: _Optional[_Union[QueueStat, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., state: _Optional[_Union[Run.State, str]] = ..., held_version: _Optional[int] = ..., detail: _Optional[str] = ..., notices: _Optional[_Iterable[_Union[Notice, _Mapping]]] = ..., num_trained: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., learning: _Optional[str] = ..., speed: _Optional[str] = ..., learning_finding: _Optional[_Union[Finding, _Mapping]] = ..., speed_finding: _Optional[_Union[Finding, _Mapping]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("code", "level", "text", "advice", "check")
    class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEVEL_UNSPECIFIED: _ClassVar[Finding.Level]
        OK: _ClassVar[Finding.Level]
        WARN: _ClassVar[Finding.Level]
        FAIL: _ClassVar[Finding.Level]
    LEVEL_UNSPECIFIED: Finding.Level
    OK: Finding.Level
    WARN: Finding.Level
    FAIL: Finding.Level
    CODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    code: str
    level: Finding.Level
    text: str
    advice: str
    check: str
    def __init__(self, code: _Optional[str] = ..., level: _Optional[_Union[Finding.Level, str]] = ..., text: _Optional[str] = ..., advice: _Optional[str] = ..., check: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("component", "phases")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    component: str
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    def __init__(self, component: _Optional[str] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "entered_at_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENTERED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    entered_at_ms: int
    def __init__(self, name: _Optional[str] = ..., entered_at_ms: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "text", "detail", "count", "first_at_ms", "last_at_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_AT_MS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    detail: str
    count: int
    first_at_ms: int
    last_at_ms: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., detail: _Optional[str] = ..., count: _Optional[int] = ..., first_at_ms: _Optional[int] = ..., last_at_ms: _Optional[int] = ...) -> None: ...

class QueueStat(_message.Message):
    __slots__ = ("pending_prompts", "admitted", "in_flight", "queued", "delivered", "queued_bytes", "trained", "expired", "dead_lettered", "conservation_error", "redelivered", "reclaimed", "discarded", "admission_limit", "admission_room", "inserted", "saved_bytes")
    PENDING_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERED_FIELD_NUMBER: _ClassVar[int]
    CONSERVATION_ERROR_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_ROOM_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
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
    saved_bytes: int
    def __init__(self, pending_prompts: _Optional[int] = ..., admitted: _Optional[int] = ..., in_flight: _Optional[int] = ..., queued: _Optional[int] = ..., delivered: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., trained: _Optional[int] = ..., expired: _Optional[int] = ..., dead_lettered: _Optional[int] = ..., conservation_error: _Optional[int] = ..., redelivered: _Optional[int] = ..., reclaimed: _Optional[int] = ..., discarded: _Optional[int] = ..., admission_limit: _Optional[int] = ..., admission_room: _Optional[int] = ..., inserted: _Optional[int] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    def __init__(self, servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("server_id", "address", "state", "policy_version", "heartbeat_age_ms", "running_groups", "engine", "weights_digest", "is_drained", "breaker_reason", "breaker_failures", "is_quarantined", "logprob_mismatch_nats", "logprob_limit_nats", "num_reloads")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Server.State]
        JOINING: _ClassVar[Server.State]
        READY: _ClassVar[Server.State]
        LOADING: _ClassVar[Server.State]
        STALE: _ClassVar[Server.State]
        EVICTED: _ClassVar[Server.State]
    STATE_UNSPECIFIED: Server.State
    JOINING: Server.State
    READY: Server.State
    LOADING: Server.State
    STALE: Server.State
    EVICTED: Server.State
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    BREAKER_REASON_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    IS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_MISMATCH_NATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELOADS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    address: str
    state: Server.State
    policy_version: int
    heartbeat_age_ms: int
    running_groups: int
    engine: str
    weights_digest: str
    is_drained: bool
    breaker_reason: str
    breaker_failures: int
    is_quarantined: bool
    logprob_mismatch_nats: float
    logprob_limit_nats: float
    num_reloads: int
    def __init__(self, server_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[Server.State, str]] = ..., policy_version: _Optional[int] = ..., heartbeat_age_ms: _Optional[int] = ..., running_groups: _Optional[int] = ..., engine: _Optional[str] = ..., weights_digest: _Optional[str] = ..., is_drained: _Optional[bool] = ..., breaker_reason: _Optional[str] = ..., breaker_failures: _Optional[int] = ..., is_quarantined: _Optional[bool] = ..., logprob_mismatch_nats: _Optional[float] = ..., logprob_limit_nats: _Optional[float] = ..., num_reloads: _Optional[int] = ...) -> None: ...

class CreateEvaluationRequest(_message.Message):
    __slots__ = ("run", "evaluation_id", "prompts")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    evaluation_id: str
    prompts: _containers.RepeatedCompositeFieldContainer[_prompts_pb2.Prompt]
    def __init__(self, run: _Optional[str] = ..., evaluation_id: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_prompts_pb2.Prompt, _Mapping]]] = ...) -> None: ...

class GetEvaluationRequest(_message.Message):
    __slots__ = ("run", "evaluation_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    evaluation_id: str
    def __init__(self, run: _Optional[str] = ..., evaluation_id: _Optional[str] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("evaluation_id", "num_prompts", "num_finished", "score", "policy_version_min", "policy_version_max", "num_samples", "pass_at", "num_failed")
    class PassAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int
    pass_at: _containers.ScalarMap[int, float]
    num_failed: int
    def __init__(self, evaluation_id: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_finished: _Optional[int] = ..., score: _Optional[float] = ..., policy_version_min: _Optional[int] = ..., policy_version_max: _Optional[int] = ..., num_samples: _Optional[int] = ..., pass_at: _Optional[_Mapping[int, float]] = ..., num_failed: _Optional[int] = ...) -> None: ...
