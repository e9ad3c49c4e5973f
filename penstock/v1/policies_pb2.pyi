from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchPoliciesRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ComparePoliciesRequest(_message.Message):
    __slots__ = ("run", "policy_version", "other_version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OTHER_VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: int
    other_version: int
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[int] = ..., other_version: _Optional[int] = ...) -> None: ...

class PolicyComparison(_message.Message):
    __slots__ = ("policy", "other", "metric_changes", "steps_between", "same_weights")
    class MetricChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    METRIC_CHANGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_BETWEEN_FIELD_NUMBER: _ClassVar[int]
    SAME_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    other: Policy
    metric_changes: _containers.ScalarMap[str, float]
    steps_between: int
    same_weights: bool
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., other: _Optional[_Union[Policy, _Mapping]] = ..., metric_changes: _Optional[_Mapping[str, float]] = ..., steps_between: _Optional[int] = ..., same_weights: _Optional[bool] = ...) -> None: ...

class ChangePolicyRequest(_message.Message):
    __slots__ = ("run", "policy_version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: int
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class ReleasePolicyRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class PinPolicyRequest(_message.Message):
    __slots__ = ("run", "policy_version", "pin")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: int
    pin: str
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[int] = ..., pin: _Optional[str] = ...) -> None: ...

class UnpinPolicyRequest(_message.Message):
    __slots__ = ("run", "pin")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    run: str
    pin: str
    def __init__(self, run: _Optional[str] = ..., pin: _Optional[str] = ...) -> None: ...

class UnpinPolicyResponse(_message.Message):
    __slots__ = ("was_pinned",)
    WAS_PINNED_FIELD_NUMBER: _ClassVar[int]
    was_pinned: bool
    def __init__(self, was_pinned: _Optional[bool] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("policies", "next_page_token")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[Policy]
    next_page_token: str
    def __init__(self, policies: _Optional[_Iterable[_Union[Policy, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ("run", "policy_version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: int
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("policy_version", "step", "parent_version", "published_at_ms", "weights_digest", "snapshot_path", "state", "metrics", "server_ids", "is_held", "pins")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Policy.State]
        PUBLISHED: _ClassVar[Policy.State]
        PROMOTED: _ClassVar[Policy.State]
        RETIRED: _ClassVar[Policy.State]
    STATE_UNSPECIFIED: Policy.State
    PUBLISHED: Policy.State
    PROMOTED: Policy.State
    RETIRED: Policy.State
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PATH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SERVER_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    step: int
    parent_version: int
    published_at_ms: int
    weights_digest: str
    snapshot_path: str
    state: Policy.State
    metrics: _containers.ScalarMap[str, float]
    server_ids: _containers.RepeatedScalarFieldContainer[str]
    is_held: bool
    pins: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy_version: _Optional[int] = ..., step: _Optional[int] = ..., parent_version: _Optional[int] = ..., published_at_ms: _Optional[int] = ..., weights_digest: _Optional[str] = ..., snapshot_path: _Optional[str] = ..., state: _Optional[_Union[Policy.State, str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., server_ids: _Optional[_Iterable[str]] = ..., is_held: _Optional[bool] = ..., pins: _Optional[_Iterable[str]] = ...) -> None: ...
