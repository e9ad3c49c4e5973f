from penstock.v1 import groups_pb2 as _groups_pb2
from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NAMED: _ClassVar[ToolChoice]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
TOOL_CHOICE_NAMED: ToolChoice

class GenerateRequest(_message.Message):
    __slots__ = ("run", "messages", "text", "token_ids", "sampling", "stop", "stream", "session_id", "policy_version", "tools_json", "tool_choice", "tool_name", "single_tool_call", "template_arguments_json", "json_schema", "json_object", "render_only", "history_token_ids")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    RENDER_ONLY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    messages: _containers.RepeatedCompositeFieldContainer[_prompts_pb2.Message]
    text: str
    token_ids: bytes
    sampling: _prompts_pb2.Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    stream: bool
    session_id: str
    policy_version: int
    tools_json: str
    tool_choice: ToolChoice
    tool_name: str
    single_tool_call: bool
    template_arguments_json: str
    json_schema: str
    json_object: bool
    render_only: bool
    history_token_ids: bytes
    def __init__(self, run: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_prompts_pb2.Message, _Mapping]]] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stream: _Optional[bool] = ..., session_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., tools_json: _Optional[str] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., single_tool_call: _Optional[bool] = ..., template_arguments_json: _Optional[str] = ..., json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., render_only: _Optional[bool] = ..., history_token_ids: _Optional[bytes] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("text", "token_ids", "log_probs", "segments", "finish_reason", "prompt_token_ids", "server_id", "sampling", "tool_calls", "stop_text")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    log_probs: bytes
    segments: _containers.RepeatedCompositeFieldContainer[_groups_pb2.VersionSegment]
    finish_reason: _groups_pb2.Trajectory.FinishReason
    prompt_token_ids: bytes
    server_id: str
    sampling: _prompts_pb2.Sampling
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallPart]
    stop_text: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[_groups_pb2.VersionSegment, _Mapping]]] = ..., finish_reason: _Optional[_Union[_groups_pb2.Trajectory.FinishReason, str]] = ..., prompt_token_ids: _Optional[bytes] = ..., server_id: _Optional[str] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallPart, _Mapping]]] = ..., stop_text: _Optional[str] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "call_id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    call_id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...
