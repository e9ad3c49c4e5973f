from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightManifest(_message.Message):
    __slots__ = ("run", "policy_version", "term", "tensors", "buckets", "checksum", "base_version", "retain", "adapter")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: int
    term: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketSpec]
    checksum: str
    base_version: int
    retain: bool
    adapter: Adapter
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[int] = ..., term: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[BucketSpec, _Mapping]]] = ..., checksum: _Optional[str] = ..., base_version: _Optional[int] = ..., retain: _Optional[bool] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("scale",)
    SCALE_FIELD_NUMBER: _ClassVar[int]
    scale: float
    def __init__(self, scale: _Optional[float] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "bucket", "offset_bytes", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    bucket: int
    offset_bytes: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., bucket: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class BucketSpec(_message.Message):
    __slots__ = ("num_bytes", "wire_bytes")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    wire_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class SnapshotManifest(_message.Message):
    __slots__ = ("manifest", "bucket_checksums", "manifest_checksum")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    bucket_checksums: _containers.RepeatedScalarFieldContainer[str]
    manifest_checksum: str
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., bucket_checksums: _Optional[_Iterable[str]] = ..., manifest_checksum: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("manifest", "transport", "rendezvous", "rank", "world_size", "deadline_s")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    transport: str
    rendezvous: str
    rank: int
    world_size: int
    deadline_s: float
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., transport: _Optional[str] = ..., rendezvous: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ("serving_version", "needs_full")
    SERVING_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FULL_FIELD_NUMBER: _ClassVar[int]
    serving_version: int
    needs_full: bool
    def __init__(self, serving_version: _Optional[int] = ..., needs_full: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("policy_version", "term", "bucket_checksums", "deadline_s")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    term: int
    bucket_checksums: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    def __init__(self, policy_version: _Optional[int] = ..., term: _Optional[int] = ..., bucket_checksums: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("policy_version", "paused_s", "running_requests", "receive_s", "load_s")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    paused_s: float
    running_requests: int
    receive_s: float
    load_s: float
    def __init__(self, policy_version: _Optional[int] = ..., paused_s: _Optional[float] = ..., running_requests: _Optional[int] = ..., receive_s: _Optional[float] = ..., load_s: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("policy_version", "reason", "term")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    reason: str
    term: int
    def __init__(self, policy_version: _Optional[int] = ..., reason: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
