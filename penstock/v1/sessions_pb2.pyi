from penstock.v1 import groups_pb2 as _groups_pb2
from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
