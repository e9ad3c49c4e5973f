from penstock.v1 import prompts_pb2 as _prompts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListGroupsRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "next_page_token")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupSummary]
    next_page_token: str
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GroupSummary(_message.Message):
    __slots__ = ("prompt_id", "attempt", "server_id", "data_source", "num_trajectories", "num_tokens", "mean_reward", "min_version", "max_version", "finished_at_ms", "is_taken")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    prompt_id: int
    attempt: int
    server_id: str
    data_source: str
    num_trajectories: int
    num_tokens: int
    mean_reward: float
    min_version: int
    max_version: int
    finished_at_ms: int
    is_taken: bool
    def __init__(self, prompt_id: _Optional[int] = ..., attempt: _Optional[int] = ..., server_id: _Optional[str] = ..., data_source: _Optional[str] = ..., num_trajectories: _Optional[int] = ..., num_tokens: _Optional[int] = ..., mean_reward: _Optional[float] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., finished_at_ms: _Optional[int] = ..., is_taken: _Optional[bool] = ...) -> None: ...

class ListSamplesRequest(_message.Message):
    __slots__ = ("run", "page_size", "page_token", "order", "min_step", "max_step", "min_reward", "max_reward", "prompt_id", "data_source", "text", "validation")
    class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ORDER_UNSPECIFIED: _ClassVar[ListSamplesRequest.Order]
        WORST: _ClassVar[ListSamplesRequest.Order]
        BEST: _ClassVar[ListSamplesRequest.Order]
    ORDER_UNSPECIFIED: ListSamplesRequest.Order
    WORST: ListSamplesRequest.Order
    BEST: ListSamplesRequest.Order
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MIN_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MAX_REWARD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    page_size: int
    page_token: str
    order: ListSamplesRequest.Order
    min_step: int
    max_step: int
    min_reward: float
    max_reward: float
    prompt_id: int
    data_source: str
    text: str
    validation: bool
    def __init__(self, run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., order: _Optional[_Union[ListSamplesRequest.Order, str]] = ..., min_step: _Optional[int] = ..., max_step: _Optional[int] = ..., min_reward: _Optional[float] = ..., max_reward: _Optional[float] = ..., prompt_id: _Optional[int] = ..., data_source: _Optional[str] = ..., text: _Optional[str] = ..., validation: _Optional[bool] = ...) -> None: ...

class ListSamplesResponse(_message.Message):
    __slots__ = ("samples", "next_page_token")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    next_page_token: str
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("step", "policy_version", "prompt_id", "sample", "data_source", "prompt", "ground_truth_json", "response", "reward", "reward_parts", "num_tokens", "min_version", "max_version", "finish_reason", "is_baseline", "server_id", "agent_name", "attempt", "finished_at_ms", "reward_failed", "owner", "validation")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_BASELINE_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FAILED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: int
    prompt_id: int
    sample: int
    data_source: str
    prompt: str
    ground_truth_json: str
    response: str
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    num_tokens: int
    min_version: int
    max_version: int
    finish_reason: str
    is_baseline: bool
    server_id: str
    agent_name: str
    attempt: int
    finished_at_ms: int
    reward_failed: bool
    owner: str
    validation: str
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[int] = ..., prompt_id: _Optional[int] = ..., sample: _Optional[int] = ..., data_source: _Optional[str] = ..., prompt: _Optional[str] = ..., ground_truth_json: _Optional[str] = ..., response: _Optional[str] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., num_tokens: _Optional[int] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., finish_reason: _Optional[str] = ..., is_baseline: _Optional[bool] = ..., server_id: _Optional[str] = ..., agent_name: _Optional[str] = ..., attempt: _Optional[int] = ..., finished_at_ms: _Optional[int] = ..., reward_failed: _Optional[bool] = ..., owner: _Optional[str] = ..., validation: _Optional[str] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("run", "prompt_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    prompt_id: int
    def __init__(self, run: _Optional[str] = ..., prompt_id: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("run", "prompt_id", "attempt", "server_id", "data_source", "agent_name", "sampling", "prompt_token_ids", "trajectories", "finished_at_ms", "trace_parent")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    prompt_id: int
    attempt: int
    server_id: str
    data_source: str
    agent_name: str
    sampling: _prompts_pb2.Sampling
    prompt_token_ids: bytes
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    finished_at_ms: int
    trace_parent: str
    def __init__(self, run: _Optional[str] = ..., prompt_id: _Optional[int] = ..., attempt: _Optional[int] = ..., server_id: _Optional[str] = ..., data_source: _Optional[str] = ..., agent_name: _Optional[str] = ..., sampling: _Optional[_Union[_prompts_pb2.Sampling, _Mapping]] = ..., prompt_token_ids: _Optional[bytes] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., finished_at_ms: _Optional[int] = ..., trace_parent: _Optional[str] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("token_ids", "loss_mask", "log_probs", "segments", "reward", "reward_parts", "finish_reason", "is_baseline", "text", "tokens", "learner_log_probs", "reward_failed", "sampling_segments", "routed_experts", "token_rewards", "server_ids", "episode")
    class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FINISH_REASON_UNSPECIFIED: _ClassVar[Trajectory.FinishReason]
        STOP: _ClassVar[Trajectory.FinishReason]
        LENGTH: _ClassVar[Trajectory.FinishReason]
        ABORTED: _ClassVar[Trajectory.FinishReason]
    FINISH_REASON_UNSPECIFIED: Trajectory.FinishReason
    STOP: Trajectory.FinishReason
    LENGTH: Trajectory.FinishReason
    ABORTED: Trajectory.FinishReason
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_BASELINE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARNER_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FAILED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_IDS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    loss_mask: bytes
    log_probs: bytes
    segments: _containers.RepeatedCompositeFieldContainer[VersionSegment]
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    finish_reason: Trajectory.FinishReason
    is_baseline: bool
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[str]
    learner_log_probs: bytes
    reward_failed: bool
    sampling_segments: _containers.RepeatedCompositeFieldContainer[SamplingSegment]
    routed_experts: RoutedExperts
    token_rewards: _containers.RepeatedCompositeFieldContainer[TokenReward]
    server_ids: _containers.RepeatedScalarFieldContainer[str]
    episode: int
    def __init__(self, token_ids: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[VersionSegment, _Mapping]]] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., finish_reason: _Optional[_Union[Trajectory.FinishReason, str]] = ..., is_baseline: _Optional[bool] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[str]] = ..., learner_log_probs: _Optional[bytes] = ..., reward_failed: _Optional[bool] = ..., sampling_segments: _Optional[_Iterable[_Union[SamplingSegment, _Mapping]]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., token_rewards: _Optional[_Iterable[_Union[TokenReward, _Mapping]]] = ..., server_ids: _Optional[_Iterable[str]] = ..., episode: _Optional[int] = ...) -> None: ...

class SavedTokens(_message.Message):
    __slots__ = ("tokens", "server_id", "is_finished", "is_handed_over", "num_turns", "last_turn_start", "num_user_turns", "tool_rewards", "turn_scores", "turn_rewards", "final_reward")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    IS_HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    LAST_TURN_START_FIELD_NUMBER: _ClassVar[int]
    NUM_USER_TURNS_FIELD_NUMBER: _ClassVar[int]
    TOOL_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_REWARD_FIELD_NUMBER: _ClassVar[int]
    tokens: Trajectory
    server_id: str
    is_finished: bool
    is_handed_over: bool
    num_turns: int
    last_turn_start: int
    num_user_turns: int
    tool_rewards: _containers.RepeatedScalarFieldContainer[float]
    turn_scores: _containers.RepeatedScalarFieldContainer[float]
    turn_rewards: _containers.RepeatedScalarFieldContainer[float]
    final_reward: float
    def __init__(self, tokens: _Optional[_Union[Trajectory, _Mapping]] = ..., server_id: _Optional[str] = ..., is_finished: _Optional[bool] = ..., is_handed_over: _Optional[bool] = ..., num_turns: _Optional[int] = ..., last_turn_start: _Optional[int] = ..., num_user_turns: _Optional[int] = ..., tool_rewards: _Optional[_Iterable[float]] = ..., turn_scores: _Optional[_Iterable[float]] = ..., turn_rewards: _Optional[_Iterable[float]] = ..., final_reward: _Optional[float] = ...) -> None: ...

class TokenReward(_message.Message):
    __slots__ = ("index", "reward")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    index: int
    reward: float
    def __init__(self, index: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class SamplingSegment(_message.Message):
    __slots__ = ("start", "end", "temperature", "top_p", "top_k", "min_p")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("ids", "num_layers", "top_k", "id_bytes")
    IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    num_layers: int
    top_k: int
    id_bytes: int
    def __init__(self, ids: _Optional[bytes] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ...) -> None: ...

class VersionSegment(_message.Message):
    __slots__ = ("start", "end", "policy_version")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    policy_version: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...
