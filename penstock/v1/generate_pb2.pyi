from penstock.v1 import groups_pb2 as _groups_pb2
from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("run", "messages", "text", "token_ids", "sampling", "stop", "stream", "session_id", "policy_version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    messages: _containers.RepeatedCompositeFieldContainer[_prompts_pb2.Message]
    text: str
    token_ids: bytes
    sampling: _prompts_pb2.Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    stream: bool
    session_id: str
    policy_version: int
    def __init__(self, run: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_prompts_pb2.Message, _Mapping]]] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stream: _Optional[bool] = ..., session_id: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("text", "token_ids", "log_probs", "segments", "finish_reason", "prompt_token_ids", "server_id", "sampling")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    log_probs: bytes
    segments: _containers.RepeatedCompositeFieldContainer[_groups_pb2.VersionSegment]
    finish_reason: _groups_pb2.Trajectory.FinishReason
    prompt_token_ids: bytes
    server_id: str
    sampling: _prompts_pb2.Sampling
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[_groups_pb2.VersionSegment, _Mapping]]] = ..., finish_reason: _Optional[_Union[_groups_pb2.Trajectory.FinishReason, str]] = ..., prompt_token_ids: _Optional[bytes] = ..., server_id: _Optional[str] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ...) -> None: ...

class RewardSessionRequest(_message.Message):
    __slots__ = ("run", "session_id", "reward", "reward_parts")
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
    run: str
    session_id: str
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    def __init__(self, run: _Optional[str] = ..., session_id: _Optional[str] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RewardSessionResponse(_message.Message):
    __slots__ = ("prompt_ids", "replayed")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    replayed: bool
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., replayed: _Optional[bool] = ...) -> None: ...
