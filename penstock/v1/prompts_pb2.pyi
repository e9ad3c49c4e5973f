from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitPromptsRequest(_message.Message):
    __slots__ = ("run", "idempotency_key", "prompts", "prompt_keys")
    RUN_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    run: str
    idempotency_key: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    prompt_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., prompt_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitPromptsResponse(_message.Message):
    __slots__ = ("prompt_ids", "replayed", "num_replayed")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    replayed: bool
    num_replayed: int
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., replayed: _Optional[bool] = ..., num_replayed: _Optional[int] = ...) -> None: ...

class GetPromptRequest(_message.Message):
    __slots__ = ("run", "prompt_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    prompt_id: int
    def __init__(self, run: _Optional[str] = ..., prompt_id: _Optional[int] = ...) -> None: ...

class ListPromptsRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token", "state", "data_source")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    state: PromptRecord.State
    data_source: str
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., state: _Optional[_Union[PromptRecord.State, str]] = ..., data_source: _Optional[str] = ...) -> None: ...

class ListPromptsResponse(_message.Message):
    __slots__ = ("prompts", "next_page_token")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptRecord]
    next_page_token: str
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptRecord, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelPromptsRequest(_message.Message):
    __slots__ = ("run", "prompt_ids")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelPromptsResponse(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptRecord]
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptRecord, _Mapping]]] = ...) -> None: ...

class WaitPromptRequest(_message.Message):
    __slots__ = ("run", "prompt_id", "timeout_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    prompt_id: int
    timeout_s: float
    def __init__(self, run: _Optional[str] = ..., prompt_id: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WatchResultsRequest(_message.Message):
    __slots__ = ("run", "cursor", "prompt_ids", "with_groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    WITH_GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    cursor: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    with_groups: bool
    def __init__(self, run: _Optional[str] = ..., cursor: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., with_groups: _Optional[bool] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("cursor", "prompt_id", "state", "reason", "attempt", "group")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    prompt_id: int
    state: PromptRecord.State
    reason: str
    attempt: int
    group: bytes
    def __init__(self, cursor: _Optional[str] = ..., prompt_id: _Optional[int] = ..., state: _Optional[_Union[PromptRecord.State, str]] = ..., reason: _Optional[str] = ..., attempt: _Optional[int] = ..., group: _Optional[bytes] = ...) -> None: ...

class PromptRecord(_message.Message):
    __slots__ = ("prompt_id", "state", "prompt", "attempt")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[PromptRecord.State]
        PENDING: _ClassVar[PromptRecord.State]
        LEASED: _ClassVar[PromptRecord.State]
        QUEUED: _ClassVar[PromptRecord.State]
        TRAINED: _ClassVar[PromptRecord.State]
        DEAD_LETTERED: _ClassVar[PromptRecord.State]
        CANCELLED: _ClassVar[PromptRecord.State]
    STATE_UNSPECIFIED: PromptRecord.State
    PENDING: PromptRecord.State
    LEASED: PromptRecord.State
    QUEUED: PromptRecord.State
    TRAINED: PromptRecord.State
    DEAD_LETTERED: PromptRecord.State
    CANCELLED: PromptRecord.State
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    prompt_id: int
    state: PromptRecord.State
    prompt: Prompt
    attempt: int
    def __init__(self, prompt_id: _Optional[int] = ..., state: _Optional[_Union[PromptRecord.State, str]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("messages", "token_ids", "sampling", "num_samples", "agent_name", "data_source", "ground_truth_json", "extra_info_json", "priority", "evaluation_id", "trace_parent", "owner")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_JSON_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    token_ids: bytes
    sampling: Sampling
    num_samples: int
    agent_name: str
    data_source: str
    ground_truth_json: str
    extra_info_json: str
    priority: int
    evaluation_id: str
    trace_parent: str
    owner: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_samples: _Optional[int] = ..., agent_name: _Optional[str] = ..., data_source: _Optional[str] = ..., ground_truth_json: _Optional[str] = ..., extra_info_json: _Optional[str] = ..., priority: _Optional[int] = ..., evaluation_id: _Optional[str] = ..., trace_parent: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "fields_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "max_tokens", "seed", "top_k", "min_p", "ignore_eos", "stop")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    top_k: int
    min_p: float
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., ignore_eos: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...
