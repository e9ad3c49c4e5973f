"""Encodes prompts and groups for the wire and for Redis: prompts as protobuf, groups as protobuf in a zstd frame.

A stored group is `MAGIC + schema version (uint16 LE) + zstd frame`. The frame has zstd's content checksum, so decoding
finds a flipped bit anywhere in the content. Arrays are raw little-endian bytes.

A group is stored under the oldest schema version that can express it. So a reader of an older release reads all groups
except the ones that it would misread, which it refuses:

    1   every group without the fields below
    2   trajectories with `sampling_segments`
    3   trajectories that are one `episode` together

Optional fields that an older reader may ignore, such as the routed experts, do not change the schema version.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from penstock.errors import PoisonGroup
from penstock.reward_bounds import RANGE, is_reward
from penstock.sampling import DISTRIBUTION_FIELDS, SAMPLING_FIELDS, Distribution, Sampling
from penstock.trajectory import (
    ExpertIds,
    FinishReason,
    Group,
    Prompt,
    SamplingSegment,
    TokenRange,
    TokenReward,
    Trajectory,
    VersionSegment,
)
from penstock.v1 import groups_pb2, prompts_pb2

M = TypeVar("M", bound=Message)

MAGIC = b"PSK"
SCHEMA_VERSION = 3
"""The newest schema version. All versions from 1 on can be read."""
SAVED_MAGIC = b"PSP"
SAVED_SCHEMA_VERSION = 1
_HEADER = struct.Struct("<3sH")
_MAX_GROUP_BYTES = 1 << 30
_EXPERT_TYPES = {1: "<u1", 2: "<u2"}
"""Types of an expert's id, by its bytes."""

FINISH_TO_PROTO: dict[FinishReason, groups_pb2.Trajectory.FinishReason] = {
    "stop": groups_pb2.Trajectory.STOP,
    "length": groups_pb2.Trajectory.LENGTH,
    "aborted": groups_pb2.Trajectory.ABORTED,
}
FINISH_FROM_PROTO = {number: name for name, number in FINISH_TO_PROTO.items()}
_PLAIN_PROMPT = ("num_samples", "agent_name", "data_source", "priority", "evaluation_id", "trace_parent", "owner")
_PLAIN_GROUP = (
    "run", "prompt_id", "attempt", "server_id", "data_source", "agent_name", "finished_at_ms", "trace_parent",
)  # fmt: skip
"""Fields that a message has as they are."""


class _Thread(threading.local):
    """Makes both once for each thread: two must not use one at once, and making one takes longer than a small group."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


_thread = _Thread()


def prompt_to_proto(prompt: Prompt) -> prompts_pb2.Prompt:
    fields = {number: json.dumps(further) for number, further in prompt.message_fields.items()}
    return prompts_pb2.Prompt(
        messages=[
            prompts_pb2.Message(role=role, content=content, fields_json=fields.get(number, ""))
            for number, (role, content) in enumerate(prompt.messages)
        ],
        token_ids=np.asarray(prompt.token_ids, dtype="<i4").tobytes(),
        sampling=sampling_to_proto(prompt.sampling),
        ground_truth_json=json.dumps(prompt.ground_truth),
        extra_info_json=json.dumps(prompt.extra_info),
        **{name: getattr(prompt, name) for name in _PLAIN_PROMPT},
    )


def messages_from_proto(
    messages: Iterable[prompts_pb2.Message],
) -> tuple[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]]:
    """Role and content of each message, and the further fields of messages that have some, by number."""
    listed = list(messages)
    fields = {number: json.loads(m.fields_json) for number, m in enumerate(listed) if m.fields_json}
    return tuple((m.role, m.content) for m in listed), fields


def encode_prompt(prompt: Prompt) -> bytes:
    return prompt_to_proto(prompt).SerializeToString()


def decode_prompt(data: bytes) -> Prompt:
    message = prompts_pb2.Prompt.FromString(data)
    messages, message_fields = messages_from_proto(message.messages)
    return Prompt(
        messages=messages,
        message_fields=message_fields,
        token_ids=tuple(np.frombuffer(message.token_ids, dtype="<i4").tolist()),
        sampling=sampling_from_proto(message.sampling),
        ground_truth=json.loads(message.ground_truth_json or "null"),
        extra_info=json.loads(message.extra_info_json or "{}"),
        **{name: getattr(message, name) for name in _PLAIN_PROMPT},
    )


def encode_group(group: Group) -> bytes:
    """Encode a group for storage. It never fails for a valid group."""
    has_episodes = any(trajectory.episode for trajectory in group.trajectories)
    version = 3 if has_episodes else 2 if any(each.sampling_segments for each in group.trajectories) else 1
    return _HEADER.pack(MAGIC, version) + _thread.compressor.compress(group_to_proto(group).SerializeToString())


def decode_group(data: bytes) -> Group:
    """Decode and check a stored group. Raises PoisonGroup with the dead-letter reason."""
    if len(data) < _HEADER.size:
        raise PoisonGroup("corrupt", f"{len(data)} bytes are too few for a group")
    magic, schema = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PoisonGroup("corrupt", "not a group: wrong magic bytes")
    if not 1 <= schema <= SCHEMA_VERSION:
        raise PoisonGroup("schema", f"schema version {schema} is not one of 1 to {SCHEMA_VERSION}; upgrade this side")
    group = group_from_proto(_decompressed(groups_pb2.Group, data))
    check_group(group)
    return group


def encode_saved(tokens: groups_pb2.SavedTokens) -> bytes:
    """Encode saved tokens, as `SAVED_MAGIC + schema version + zstd frame`."""
    return _HEADER.pack(SAVED_MAGIC, SAVED_SCHEMA_VERSION) + _thread.compressor.compress(tokens.SerializeToString())


def decode_saved(data: bytes) -> groups_pb2.SavedTokens:
    """Decode saved tokens. Raises PoisonGroup if they are damaged, or those of another release."""
    if data[: _HEADER.size] != _HEADER.pack(SAVED_MAGIC, SAVED_SCHEMA_VERSION):
        raise PoisonGroup("schema", f"not saved tokens of schema version {SAVED_SCHEMA_VERSION}")
    return _decompressed(groups_pb2.SavedTokens, data)


def _decompressed(kind: type[M], data: bytes) -> M:
    frame = data[_HEADER.size :]
    try:
        # The checksum does not cover the frame's header. A damaged header could ask for any amount of memory.
        parameters = zstandard.get_frame_parameters(frame)
        if not parameters.has_checksum or parameters.content_size > _MAX_GROUP_BYTES:
            raise PoisonGroup("corrupt", "the frame's header is damaged")
        return kind.FromString(_thread.decompressor.decompress(frame, allow_extra_data=False))
    except (zstandard.ZstdError, DecodeError) as error:
        raise PoisonGroup("corrupt", f"cannot decode: {error}") from error


def check_group(group: Group) -> None:
    """Raise PoisonGroup unless shapes agree, segments cover every token, and all numbers are finite in float32."""
    _check_sampling("the group", group.sampling)
    if not group.trajectories:
        raise PoisonGroup("shape", "the group has no trajectories")
    if all(trajectory.is_baseline for trajectory in group.trajectories):
        raise PoisonGroup("shape", "the group has only baselines, so there is nothing to train on")
    if not len(group.prompt_token_ids):
        raise PoisonGroup("shape", "the group has no prompt tokens, so nothing predicts its first response token")
    for index, trajectory in enumerate(group.trajectories):
        num_tokens = len(trajectory.token_ids)
        if num_tokens == 0:
            raise PoisonGroup("shape", f"trajectory {index} has no tokens")
        if len(trajectory.loss_mask) != num_tokens or len(trajectory.log_probs) != num_tokens:
            raise PoisonGroup("shape", f"trajectory {index}: arrays differ in length")
        check_cover(f"trajectory {index}: version segments", trajectory.segments, num_tokens)
        if trajectory.sampling_segments:
            check_cover(f"trajectory {index}: sampling segments", trajectory.sampling_segments, num_tokens)
            for segment in trajectory.sampling_segments:
                _check_sampling(f"trajectory {index}", segment)
        _check_token_rewards(index, trajectory)
        experts = trajectory.routed_experts
        if experts is not None and len(experts) != len(group.prompt_token_ids) + num_tokens - 1:
            raise PoisonGroup("shape", f"trajectory {index}: routed experts of {len(experts)} tokens do not fit it")
        if not is_reward(trajectory.reward):
            raise PoisonGroup(
                "non_finite",
                f"trajectory {index} of prompt {group.prompt_id}: the reward {trajectory.reward:g} is not a number "
                f"{RANGE}",
            )
    if not np.isfinite(np.concatenate([trajectory.log_probs for trajectory in group.trajectories])).all():
        index = next(i for i, each in enumerate(group.trajectories) if not np.isfinite(each.log_probs).all())
        raise PoisonGroup("non_finite", f"trajectory {index}: a log-prob is not finite")


def _check_token_rewards(index: int, trajectory: Trajectory) -> None:
    last = -1
    for given in trajectory.token_rewards:
        if not last < given.index < len(trajectory.token_ids):
            raise PoisonGroup("shape", f"trajectory {index}: token rewards are out of order or range at {given.index}")
        if not is_reward(given.reward):
            raise PoisonGroup("non_finite", f"trajectory {index}: the reward of token {given.index} is not {RANGE}")
        last = given.index


def check_cover(what: str, segments: Sequence[TokenRange], end: int, start: int = 0) -> None:
    """Raise PoisonGroup unless the segments cover the tokens from `start` to `end`, in order."""
    covered = start
    for segment in segments:
        if segment.start != covered or segment.end <= segment.start:
            raise PoisonGroup("shape", f"{what} leave a gap at token {covered}")
        covered = segment.end
    if covered != end:
        raise PoisonGroup("shape", f"{what} end at {covered} of {end}")


def _check_sampling(where: str, sampling: Distribution) -> None:
    """The learner divides logits by the temperature, so a wrong one makes every log-prob wrong."""
    if not 0 <= sampling.temperature < math.inf:
        raise PoisonGroup("shape", f"{where}: the temperature {sampling.temperature:g} is not finite, 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise PoisonGroup("shape", f"{where}: top_p {sampling.top_p:g} is not above 0 and at most 1")


def group_to_proto(group: Group) -> groups_pb2.Group:
    return groups_pb2.Group(
        sampling=sampling_to_proto(group.sampling),
        prompt_token_ids=group.prompt_token_ids.astype("<i4").tobytes(),
        trajectories=[trajectory_to_proto(t) for t in group.trajectories],
        **{name: getattr(group, name) for name in _PLAIN_GROUP},
    )


def group_from_proto(message: groups_pb2.Group) -> Group:
    return Group(
        sampling=sampling_from_proto(message.sampling),
        prompt_token_ids=_int32(message.prompt_token_ids),
        trajectories=tuple(trajectory_from_proto(t) for t in message.trajectories),
        **{name: getattr(message, name) for name in _PLAIN_GROUP},
    )


def trajectory_to_proto(trajectory: Trajectory) -> groups_pb2.Trajectory:
    return groups_pb2.Trajectory(
        token_ids=trajectory.token_ids.astype("<i4").tobytes(),
        loss_mask=trajectory.loss_mask.astype(np.uint8).tobytes(),
        log_probs=trajectory.log_probs.astype("<f4").tobytes(),
        segments=[groups_pb2.VersionSegment(**vars(segment)) for segment in trajectory.segments],
        reward=trajectory.reward,
        reward_parts=trajectory.reward_parts,
        finish_reason=FINISH_TO_PROTO[trajectory.finish_reason],
        is_baseline=trajectory.is_baseline,
        sampling_segments=[groups_pb2.SamplingSegment(**vars(segment)) for segment in trajectory.sampling_segments],
        episode=trajectory.episode,
        routed_experts=None if trajectory.routed_experts is None else _experts_to_proto(trajectory.routed_experts),
        reward_failed=trajectory.reward_failed,
        token_rewards=[groups_pb2.TokenReward(**vars(given)) for given in trajectory.token_rewards],
        server_ids=trajectory.server_ids,
    )


def trajectory_from_proto(message: groups_pb2.Trajectory) -> Trajectory:
    # The fields that are set, and not empty. To read the others would take as long.
    found: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    return Trajectory(
        token_ids=_int32(found.get("token_ids", b"")),
        loss_mask=np.frombuffer(found.get("loss_mask", b""), dtype=np.uint8),
        log_probs=_array(found.get("log_probs", b""), "<f4", "log_probs").astype(np.float32, copy=False),
        segments=tuple([VersionSegment(s.start, s.end, s.policy_version) for s in found.get("segments", ())]),
        reward=found.get("reward", 0.0),
        reward_parts=dict(found.get("reward_parts", ())),
        finish_reason=FINISH_FROM_PROTO.get(found.get("finish_reason", 0), "stop"),
        is_baseline=found.get("is_baseline", False),
        sampling_segments=tuple(
            SamplingSegment(s.start, s.end, *[getattr(s, name) for name in DISTRIBUTION_FIELDS])
            for s in found.get("sampling_segments", ())
        ),
        episode=found.get("episode", 0),
        routed_experts=_experts_from_proto(found["routed_experts"]) if "routed_experts" in found else None,
        reward_failed=found.get("reward_failed", False),
        token_rewards=tuple(TokenReward(t.index, t.reward) for t in found.get("token_rewards", ())),
        server_ids=tuple(found.get("server_ids", ())),
    )


def _experts_to_proto(experts: ExpertIds) -> groups_pb2.RoutedExperts:
    _, num_layers, top_k = experts.shape
    size = experts.dtype.itemsize
    ids = experts.astype(_EXPERT_TYPES[size]).tobytes()
    return groups_pb2.RoutedExperts(ids=ids, num_layers=num_layers, top_k=top_k, id_bytes=size)


def _experts_from_proto(message: groups_pb2.RoutedExperts) -> ExpertIds:
    if message.id_bytes not in _EXPERT_TYPES or message.num_layers < 1 or message.top_k < 1:
        raise PoisonGroup("shape", "routed experts have no valid layers, experts per token or id size")
    ids = _array(message.ids, _EXPERT_TYPES[message.id_bytes], "routed_experts")
    if len(ids) % (message.num_layers * message.top_k):
        raise PoisonGroup("shape", f"{len(ids)} routed experts are not a whole number of tokens")
    typed = ids.astype(np.uint8 if message.id_bytes == 1 else np.uint16, copy=False)
    return typed.reshape(-1, message.num_layers, message.top_k)


def sampling_to_proto(sampling: Sampling) -> prompts_pb2.Sampling:
    return prompts_pb2.Sampling(**vars(sampling))


def sampling_from_proto(message: prompts_pb2.Sampling) -> Sampling:
    return _read_sampling(message.SerializeToString())


@lru_cache(maxsize=256)
def _read_sampling(encoded: bytes) -> Sampling:
    """Most prompts of a run have the same parameters."""
    message = prompts_pb2.Sampling.FromString(encoded)
    values = {name: getattr(message, name) for name in SAMPLING_FIELDS}
    given = {"stop": tuple(message.stop), "seed": message.seed if message.HasField("seed") else None}
    return Sampling(**values | given)


def _int32(data: bytes) -> NDArray[np.int32]:
    return _array(data, "<i4", "token_ids").astype(np.int32, copy=False)


def _array(data: bytes, dtype: str, name: str) -> NDArray[np.generic]:
    if len(data) % np.dtype(dtype).itemsize:
        raise PoisonGroup("shape", f"{name} has {len(data)} bytes, not a whole number of elements")
    return np.frombuffer(data, dtype=dtype)
