from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NewTask(_message.Message):
    __slots__ = ("task_id", "payload_json", "num_sessions", "deadline_s", "data_source")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    payload_json: str
    num_sessions: int
    deadline_s: float
    data_source: str
    def __init__(self, task_id: _Optional[str] = ..., payload_json: _Optional[str] = ..., num_sessions: _Optional[int] = ..., deadline_s: _Optional[float] = ..., data_source: _Optional[str] = ...) -> None: ...

class SubmitTasksRequest(_message.Message):
    __slots__ = ("run", "tasks", "idempotency_key")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    run: str
    tasks: _containers.RepeatedCompositeFieldContainer[NewTask]
    idempotency_key: str
    def __init__(self, run: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[NewTask, _Mapping]]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class SubmitTasksResponse(_message.Message):
    __slots__ = ("task_ids", "replayed")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[str]
    replayed: bool
    def __init__(self, task_ids: _Optional[_Iterable[str]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class GetTaskRequest(_message.Message):
    __slots__ = ("run", "task_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    task_id: str
    def __init__(self, run: _Optional[str] = ..., task_id: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_id", "state", "num_sessions", "num_rewarded", "num_failed", "payload_json", "data_source", "session_ids", "prompt_ids", "failure")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Task.State]
        PENDING: _ClassVar[Task.State]
        OPEN: _ClassVar[Task.State]
        COMPLETE: _ClassVar[Task.State]
        FINISHED: _ClassVar[Task.State]
        FAILED: _ClassVar[Task.State]
    STATE_UNSPECIFIED: Task.State
    PENDING: Task.State
    OPEN: Task.State
    COMPLETE: Task.State
    FINISHED: Task.State
    FAILED: Task.State
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REWARDED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    state: Task.State
    num_sessions: int
    num_rewarded: int
    num_failed: int
    payload_json: str
    data_source: str
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    failure: str
    def __init__(self, task_id: _Optional[str] = ..., state: _Optional[_Union[Task.State, str]] = ..., num_sessions: _Optional[int] = ..., num_rewarded: _Optional[int] = ..., num_failed: _Optional[int] = ..., payload_json: _Optional[str] = ..., data_source: _Optional[str] = ..., session_ids: _Optional[_Iterable[str]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., failure: _Optional[str] = ...) -> None: ...

class LeaseTasksRequest(_message.Message):
    __slots__ = ("run", "worker", "max_tasks", "wait_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker: str
    max_tasks: int
    wait_s: float
    def __init__(self, run: _Optional[str] = ..., worker: _Optional[str] = ..., max_tasks: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class LeasedTask(_message.Message):
    __slots__ = ("task_id", "session_id", "attempt", "payload_json", "lease_s")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    session_id: str
    attempt: int
    payload_json: str
    lease_s: float
    def __init__(self, task_id: _Optional[str] = ..., session_id: _Optional[str] = ..., attempt: _Optional[int] = ..., payload_json: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class LeaseTasksResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[LeasedTask]
    def __init__(self, tasks: _Optional[_Iterable[_Union[LeasedTask, _Mapping]]] = ...) -> None: ...

class HeartbeatTasksRequest(_message.Message):
    __slots__ = ("run", "session_ids")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatTasksResponse(_message.Message):
    __slots__ = ("lost_session_ids",)
    LOST_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    lost_session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost_session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReturnTaskRequest(_message.Message):
    __slots__ = ("run", "session_id", "failure")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    session_id: str
    failure: str
    def __init__(self, run: _Optional[str] = ..., session_id: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class ReturnTaskResponse(_message.Message):
    __slots__ = ("returned",)
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    returned: bool
    def __init__(self, returned: _Optional[bool] = ...) -> None: ...
