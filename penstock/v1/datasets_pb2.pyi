from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UploadDatasetRequest(_message.Message):
    __slots__ = ("run", "name", "format", "content")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    format: str
    content: bytes
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., format: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class GetDatasetRequest(_message.Message):
    __slots__ = ("run", "name")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SubmitDatasetRequest(_message.Message):
    __slots__ = ("run", "name", "num_samples", "sampling")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    num_samples: int
    sampling: _prompts_pb2.Sampling
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., num_samples: _Optional[int] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("name", "format", "num_prompts", "num_submitted", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    format: str
    num_prompts: int
    num_submitted: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., format: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_submitted: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...
