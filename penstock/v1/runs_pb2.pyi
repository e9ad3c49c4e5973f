from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run", "step", "policy_version", "term", "queue", "metrics", "servers")
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
    run: str
    step: int
    policy_version: int
    term: int
    queue: QueueStat
    metrics: _containers.ScalarMap[str, float]
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., term: _Optional[int] = ..., queue: _Optional[_Union[QueueStat, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ...) -> None: ...

class QueueStat(_message.Message):
    __slots__ = ("pending_prompts", "admitted", "in_flight", "queued", "delivered", "queued_bytes", "trained", "expired", "dead_lettered", "conservation_error", "redelivered", "reclaimed", "discarded", "admission_limit", "admission_room", "inserted")
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
    def __init__(self, pending_prompts: _Optional[int] = ..., admitted: _Optional[int] = ..., in_flight: _Optional[int] = ..., queued: _Optional[int] = ..., delivered: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., trained: _Optional[int] = ..., expired: _Optional[int] = ..., dead_lettered: _Optional[int] = ..., conservation_error: _Optional[int] = ..., redelivered: _Optional[int] = ..., reclaimed: _Optional[int] = ..., discarded: _Optional[int] = ..., admission_limit: _Optional[int] = ..., admission_room: _Optional[int] = ..., inserted: _Optional[int] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers", "generation")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    generation: int
    def __init__(self, servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("server_id", "address", "state", "policy_version", "heartbeat_age_ms", "running_groups", "engine", "weights_digest")
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
    server_id: str
    address: str
    state: Server.State
    policy_version: int
    heartbeat_age_ms: int
    running_groups: int
    engine: str
    weights_digest: str
    def __init__(self, server_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[Server.State, str]] = ..., policy_version: _Optional[int] = ..., heartbeat_age_ms: _Optional[int] = ..., running_groups: _Optional[int] = ..., engine: _Optional[str] = ..., weights_digest: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("evaluation_id", "num_prompts", "num_finished", "score", "policy_version_min", "policy_version_max", "num_samples", "pass_at")
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
    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int
    pass_at: _containers.ScalarMap[int, float]
    def __init__(self, evaluation_id: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_finished: _Optional[int] = ..., score: _Optional[float] = ..., policy_version_min: _Optional[int] = ..., policy_version_max: _Optional[int] = ..., num_samples: _Optional[int] = ..., pass_at: _Optional[_Mapping[int, float]] = ...) -> None: ...
