from penstock.v1 import groups_pb2 as _groups_pb2
from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RewardSessionRequest(_message.Message):
    __slots__ = ("run", "session_id", "reward", "reward_parts", "task_id")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    session_id: str
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    task_id: str
    def __init__(self, run: _Optional[str] = ..., session_id: _Optional[str] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., task_id: _Optional[str] = ...) -> None: ...

class RewardSessionResponse(_message.Message):
    __slots__ = ("prompt_ids", "replayed", "is_waiting")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    IS_WAITING_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    replayed: bool
    is_waiting: bool
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., replayed: _Optional[bool] = ..., is_waiting: _Optional[bool] = ...) -> None: ...

class SessionCall(_message.Message):
    __slots__ = ("call_id", "base", "num_shared", "extra_token_ids", "token_ids", "log_probs", "segments", "finish_reason", "sampling", "server_id", "conversation_keys", "num_chars", "finished_at_ms")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    EXTRA_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    base: int
    num_shared: int
    extra_token_ids: bytes
    token_ids: bytes
    log_probs: bytes
    segments: _containers.RepeatedCompositeFieldContainer[_groups_pb2.VersionSegment]
    finish_reason: _groups_pb2.Trajectory.FinishReason
    sampling: _prompts_pb2.Sampling
    server_id: str
    conversation_keys: _containers.RepeatedScalarFieldContainer[bytes]
    num_chars: int
    finished_at_ms: int
    def __init__(self, call_id: _Optional[str] = ..., base: _Optional[int] = ..., num_shared: _Optional[int] = ..., extra_token_ids: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[_groups_pb2.VersionSegment, _Mapping]]] = ..., finish_reason: _Optional[_Union[_groups_pb2.Trajectory.FinishReason, str]] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., server_id: _Optional[str] = ..., conversation_keys: _Optional[_Iterable[bytes]] = ..., num_chars: _Optional[int] = ..., finished_at_ms: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("run", "session_id", "from_call", "max_tokens")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    run: str
    session_id: str
    from_call: int
    max_tokens: int
    def __init__(self, run: _Optional[str] = ..., session_id: _Optional[str] = ..., from_call: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session_id", "state", "reward", "reward_parts", "task_id", "num_calls", "num_bytes", "prompt_ids")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[SessionSummary.State]
        OPEN: _ClassVar[SessionSummary.State]
        REWARDED: _ClassVar[SessionSummary.State]
        FINISHED: _ClassVar[SessionSummary.State]
    STATE_UNSPECIFIED: SessionSummary.State
    OPEN: SessionSummary.State
    REWARDED: SessionSummary.State
    FINISHED: SessionSummary.State
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state: SessionSummary.State
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    task_id: str
    num_calls: int
    num_bytes: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionSummary.State, str]] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., task_id: _Optional[str] = ..., num_calls: _Optional[int] = ..., num_bytes: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("summary", "calls", "paths")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    summary: SessionSummary
    calls: _containers.RepeatedCompositeFieldContainer[SessionNode]
    paths: _containers.RepeatedCompositeFieldContainer[SessionPath]
    def __init__(self, summary: _Optional[_Union[SessionSummary, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[SessionNode, _Mapping]]] = ..., paths: _Optional[_Iterable[_Union[SessionPath, _Mapping]]] = ...) -> None: ...

class SessionNode(_message.Message):
    __slots__ = ("number", "parent", "server_id", "finish_reason", "sampling", "finished_at_ms", "num_prompt_tokens", "num_inserted", "num_sampled", "inserted_token_ids", "token_ids", "log_probs", "policy_versions", "inserted_tokens", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_INSERTED_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    INSERTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INSERTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    server_id: str
    finish_reason: _groups_pb2.Trajectory.FinishReason
    sampling: _prompts_pb2.Sampling
    finished_at_ms: int
    num_prompt_tokens: int
    num_inserted: int
    num_sampled: int
    inserted_token_ids: bytes
    token_ids: bytes
    log_probs: bytes
    policy_versions: bytes
    inserted_tokens: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., server_id: _Optional[str] = ..., finish_reason: _Optional[_Union[_groups_pb2.Trajectory.FinishReason, str]] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., finished_at_ms: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_inserted: _Optional[int] = ..., num_sampled: _Optional[int] = ..., inserted_token_ids: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., policy_versions: _Optional[bytes] = ..., inserted_tokens: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionPath(_message.Message):
    __slots__ = ("calls", "trained_calls", "num_trained_tokens", "reward")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    trained_calls: _containers.RepeatedScalarFieldContainer[int]
    num_trained_tokens: int
    reward: float
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., trained_calls: _Optional[_Iterable[int]] = ..., num_trained_tokens: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...
