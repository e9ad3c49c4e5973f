"""The stored form of prompts and groups: it round-trips, and every kind of damage is named."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.codec import (
    MAGIC,
    SCHEMA_VERSION,
    check_group,
    decode_group,
    decode_prompt,
    encode_group,
    encode_prompt,
    group_from_proto,
    group_to_proto,
)
from penstock.errors import PoisonGroup
from penstock.trajectory import Group, Prompt, Sampling, SamplingSegment, TokenReward, Trajectory, VersionSegment

OLD_GROUP = (
    "50534b010028b52ffd642500950500c4090a017210802018032209726f6c6c6f75742d302a0567736d386b320a746f6f6c5f6167656e743a"
    "0e0d0000003f150000803e18042009420c0100000002000000030000004a690a100b0000000c0000000d0000000e0000001204010100011a"
    "10cdccccbd000020c00040bf22041001180722060801100418082900e03f32110a06666f726d61741100d0616e737765723802f0bf0150fb"
    "d095ffbc310800a0c47683c4a0cae65da0294002092e5a400bcce27e78"
)
"""`make_group()` as it was stored before groups could have routed experts."""


def make_trajectory(**changes: Any) -> Trajectory:
    trajectory = Trajectory(
        token_ids=np.array([11, 12, 13, 14], dtype=np.int32),
        loss_mask=np.array([1, 1, 0, 1], dtype=np.uint8),
        log_probs=np.array([-0.1, -2.5, 0.0, -0.75], dtype=np.float32),
        segments=(VersionSegment(0, 1, 7), VersionSegment(1, 4, 8)),
        reward=0.5,
        finish_reason="length",
        reward_parts={"format": 0.25, "answer": 0.25},
    )
    return replace(trajectory, **changes)


def make_group(*trajectories: Trajectory) -> Group:
    return Group(
        run="r",
        prompt_id=2**40,
        attempt=3,
        server_id="rollout-0",
        data_source="gsm8k",
        sampling=Sampling(temperature=0.5, top_p=0.25, max_tokens=4, seed=9),
        prompt_token_ids=np.array([1, 2, 3], dtype=np.int32),
        trajectories=trajectories or (make_trajectory(), make_trajectory(reward=-1.0, finish_reason="stop")),
        agent_name="tool_agent",
        finished_at_ms=1_700_000_000_123,
    )


def test_a_baseline_is_known_as_one_and_omitted_from_the_mean_reward() -> None:
    group = make_group(make_trajectory(reward=1.0), make_trajectory(reward=0.0, is_baseline=True))
    decoded = decode_group(encode_group(group))
    assert [trajectory.is_baseline for trajectory in decoded.trajectories] == [False, True]
    assert decoded.mean_reward == 1.0
    assert poison_kind(encode_group(make_group(make_trajectory(is_baseline=True)))) == "shape"


def poison_kind(data: bytes) -> str:
    with pytest.raises(PoisonGroup) as caught:
        decode_group(data)
    return caught.value.kind


def test_a_prompt_comes_back_as_it_was() -> None:
    prompt = Prompt(
        messages=(("system", "Be brief."), ("user", "Wie viel ist 2+2? \N{SNOWMAN}")),
        sampling=Sampling(temperature=0.5, top_p=0.75, max_tokens=12, seed=-1),
        num_samples=8,
        agent_name="tool_agent",
        data_source="gsm8k",
        ground_truth=["4", 4, None],
        extra_info={"index": 3, "nested": {"a": [1.5]}},
        priority=-2,
        evaluation_id="heldout",
    )
    assert decode_prompt(encode_prompt(prompt)) == prompt
    tokenized = Prompt(token_ids=(0, 2**31 - 1))
    assert decode_prompt(encode_prompt(tokenized)) == tokenized


def test_a_group_comes_back_as_it_was() -> None:
    group = make_group(make_trajectory(), make_trajectory(reward=-1.0, finish_reason="stop", reward_failed=True))
    decoded = decode_group(encode_group(group))
    assert group_to_proto(decoded) == group_to_proto(group)
    assert decoded.sampling == group.sampling
    first = decoded.trajectories[0]
    assert (first.token_ids.dtype, first.log_probs.dtype, first.loss_mask.dtype) == (np.int32, np.float32, np.uint8)
    np.testing.assert_array_equal(first.log_probs, group.trajectories[0].log_probs)
    np.testing.assert_array_equal(first.token_versions(), [7, 8, 8, 8])
    assert (decoded.min_version, decoded.max_version, decoded.num_response_tokens) == (7, 8, 8)
    assert decoded.mean_reward == -0.25
    assert [trajectory.reward_failed for trajectory in decoded.trajectories] == [False, True]


def test_every_flipped_byte_is_found_or_harmless() -> None:
    """One bit of zstd's frame header has no meaning. Any other change must never yield a different group."""
    group = make_group()
    data = encode_group(group)
    num_harmless = 0
    for position in range(len(data)):
        for flip in (0x01, 0x04, 0x10, 0x40, 0x55, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            try:
                decoded = decode_group(bytes(damaged))
            except PoisonGroup as error:
                assert error.kind in ("corrupt", "schema"), f"byte {position} ^ {flip:#x}"
            else:
                num_harmless += 1
                assert group_to_proto(decoded) == group_to_proto(group)
    assert num_harmless <= 1


def test_every_truncation_is_found() -> None:
    data = encode_group(make_group())
    for length in range(len(data)):
        assert poison_kind(data[:length]) == "corrupt", f"{length} bytes"


def test_bytes_after_the_end_are_found() -> None:
    data = encode_group(make_group())
    assert poison_kind(data + b"\0") == poison_kind(data + data[5:]) == "corrupt"


def test_calls_with_different_sampling_are_told_apart_token_by_token() -> None:
    calls = (SamplingSegment(0, 1, 0.0, 1.0), SamplingSegment(1, 4, 0.25, 0.5, 20, 0.125))
    decoded = decode_group(encode_group(make_group(make_trajectory(sampling_segments=calls), make_trajectory())))
    mixed, plain = decoded.trajectories
    assert (mixed.sampling_segments, plain.sampling_segments) == (calls, ())
    assert mixed.token_temperatures(decoded.sampling).tolist() == [1.0, 0.25, 0.25, 0.25], "greedy is reported at 1"
    assert plain.token_temperatures(decoded.sampling).tolist() == [0.5] * 4
    assert [t.kept_probability(decoded.sampling) for t in decoded.trajectories] == [0.0, 0.25]


def test_rewards_of_tokens_are_stored() -> None:
    rewards = (TokenReward(0, 0.5), TokenReward(3, -1.0))
    decoded = decode_group(encode_group(make_group(make_trajectory(token_rewards=rewards), make_trajectory())))
    assert [trajectory.token_rewards for trajectory in decoded.trajectories] == [rewards, ()]


def test_an_older_reader_refuses_what_it_would_misread_and_reads_the_rest() -> None:
    plain = encode_group(make_group())
    mixed = encode_group(make_group(make_trajectory(sampling_segments=(SamplingSegment(0, 4, 0.5, 1.0),))))
    episodes = encode_group(make_group(make_trajectory(episode=1), make_trajectory(episode=1)))
    assert [struct.unpack_from("<3sH", data)[1] for data in (plain, mixed, episodes)] == [1, 2, 3]
    assert [path.episode for path in decode_group(episodes).trajectories] == [1, 1]


@pytest.mark.parametrize("sampling", [Sampling(temperature=-1), Sampling(temperature=float("nan")), Sampling(top_p=0)])
def test_a_group_without_a_possible_sampling_is_poison(sampling: Sampling) -> None:
    assert poison_kind(encode_group(replace(make_group(), sampling=sampling))) == "shape"


def test_another_schema_version_is_told_apart_from_damage() -> None:
    data = encode_group(make_group())
    newer = struct.pack("<3sH", MAGIC, SCHEMA_VERSION + 1) + data[5:]
    assert poison_kind(newer) == "schema"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"segments": (VersionSegment(0, 1, 7), VersionSegment(2, 4, 8))}, "shape"),
        ({"segments": (VersionSegment(0, 3, 7), VersionSegment(2, 4, 8))}, "shape"),
        ({"segments": (VersionSegment(0, 3, 7),)}, "shape"),
        ({"sampling_segments": (SamplingSegment(0, 3, 1.0, 1.0),)}, "shape"),
        ({"sampling_segments": (SamplingSegment(0, 3, 1.0, 1.0), SamplingSegment(2, 4, 1.0, 1.0))}, "shape"),
        ({"sampling_segments": (SamplingSegment(0, 4, -1.0, 1.0),)}, "shape"),
        ({"token_rewards": (TokenReward(4, 1.0),)}, "shape"),
        ({"token_rewards": (TokenReward(2, 1.0), TokenReward(2, 1.0))}, "shape"),
        ({"token_rewards": (TokenReward(2, float("inf")),)}, "non_finite"),
        ({"segments": (VersionSegment(0, 5, 7),)}, "shape"),
        ({"segments": (VersionSegment(0, 0, 7), VersionSegment(0, 4, 7))}, "shape"),
        ({"segments": ()}, "shape"),
        ({"token_ids": np.array([], dtype=np.int32)}, "shape"),
        ({"loss_mask": np.ones(3, dtype=np.uint8)}, "shape"),
        ({"log_probs": np.zeros(5, dtype=np.float32)}, "shape"),
        ({"log_probs": np.array([0, np.nan, 0, 0], dtype=np.float32)}, "non_finite"),
        ({"log_probs": np.array([0, 0, 0, -np.inf], dtype=np.float32)}, "non_finite"),
        ({"reward": float("nan")}, "non_finite"),
        ({"reward": float("inf")}, "non_finite"),
        ({"reward": 1e300}, "non_finite"),
        ({"reward": -1e39}, "non_finite"),
        ({"routed_experts": np.zeros((5, 2, 2), dtype=np.uint8)}, "shape"),
        ({"routed_experts": np.zeros((7, 2, 2), dtype=np.uint16)}, "shape"),
    ],
)
def test_a_wrong_trajectory_is_poison(changes: dict[str, Any], kind: str) -> None:
    group = make_group(make_trajectory(), make_trajectory(**changes))
    assert poison_kind(encode_group(group)) == kind
    with pytest.raises(PoisonGroup, match="trajectory 1"):
        check_group(group)


def test_a_group_without_trajectories_is_poison() -> None:
    assert poison_kind(encode_group(replace(make_group(), trajectories=()))) == "shape"


def test_arrays_without_a_whole_number_of_elements_are_poison() -> None:
    message = group_to_proto(make_group())
    message.trajectories[0].log_probs += b"\0"
    with pytest.raises(PoisonGroup) as caught:
        group_from_proto(message)
    assert caught.value.kind == "shape"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_come_back_as_they_were(dtype: type[np.unsignedinteger[Any]]) -> None:
    experts = np.arange(6 * 3 * 2, dtype=dtype).reshape(6, 3, 2) * 7  # 3 prompt tokens and 4 response tokens, less one
    group = make_group(make_trajectory(routed_experts=experts), make_trajectory())
    first, second = decode_group(encode_group(group)).trajectories
    assert first.routed_experts is not None and first.routed_experts.dtype == dtype
    np.testing.assert_array_equal(first.routed_experts, experts)
    assert second.routed_experts is None


def test_groups_from_before_routed_experts_decode() -> None:
    """The stored bytes of a group that an older version of Penstock wrote."""
    group = decode_group(bytes.fromhex(OLD_GROUP))
    assert group_to_proto(group) == group_to_proto(make_group())


@pytest.mark.parametrize(
    "changes", [{"id_bytes": 4}, {"num_layers": 0}, {"top_k": -1}, {"num_layers": 5}, {"ids": b"\1" * 13}]
)
def test_routed_experts_without_a_shape_are_poison(changes: dict[str, Any]) -> None:
    experts = np.zeros((6, 3, 2), dtype=np.uint16)
    message = group_to_proto(make_group(make_trajectory(routed_experts=experts)))
    for name, value in changes.items():
        setattr(message.trajectories[0].routed_experts, name, value)
    with pytest.raises(PoisonGroup) as caught:
        check_group(group_from_proto(message))
    assert caught.value.kind == "shape"
