"""Damaged and hostile input: every decoder answers with its own error or a whole value, and nothing else escapes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from penstock.codec import MAGIC, SCHEMA_VERSION, check_group, decode_group, encode_group, group_to_proto
from penstock.config.loading import load_config
from penstock.errors import CheckpointDamaged, ConfigError, PoisonGroup, WeightPushFailed
from penstock.trajectory import Group
from penstock.v1 import groups_pb2, weights_pb2
from penstock.weights.snapshot import FILE_NAME, MANIFEST_NAME, read_manifest, read_snapshot, write_snapshot
from penstock.weights.transports import TensorShape, build_manifest, check_manifest
from penstock_learner.checkpoints import TRAINER_FILE, CheckpointStore, read_state
from penstock_learner.term import Ledger, TrainerState
from penstock_rollout.agents.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall
from penstock_rollout.rewards.function import read_score
from penstock_rollout.rewards.rules import exact_match, gsm8k, regex
from support.fuzzing import BUDGETS, damaged, json_values, try_examples
from support.groups import make_group
from support.weight_buckets import allocate_buckets

CONFIG = """
run: r
model: {path: m, dtype: float32}
redis: {url: redis://localhost:6379/0, retry_s: 60}
replay: {groups_per_step: 8, stale_policy: drop}
rollout:
  num_servers: 2
  reward: {function_file: reward.py}
learner: {lr: 1e-6, betas: [0.9, 0.95], loggers: [jsonl]}
"""
SHAPES = {"model.embed": (4, 3), "model.norm": (3,)}
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def group_with_experts() -> Group:
    """A group whose first trajectory says which experts the engine chose."""
    group = make_group(7)
    num_tokens = len(group.prompt_token_ids) + len(group.trajectories[0].token_ids) - 1
    experts = np.arange(num_tokens * 6, dtype=np.uint16).reshape(num_tokens, 3, 2)
    return replace(
        group, trajectories=(replace(group.trajectories[0], routed_experts=experts), *group.trajectories[1:])
    )


@BUDGETS
def test_a_damaged_group_is_poison_or_whole(num_examples: int) -> None:
    whole = encode_group(group_with_experts())

    def check(data: bytes) -> None:
        try:
            group = decode_group(data)
        except PoisonGroup as error:
            assert error.kind and str(error)
        else:
            check_group(group)

    try_examples(num_examples, damaged(whole), check)


@BUDGETS
def test_a_group_of_damaged_protobuf_is_poison_or_whole(num_examples: int) -> None:
    """The frame and its checksum are valid, as if a faulty or hostile server had written them."""
    header = MAGIC + SCHEMA_VERSION.to_bytes(2, "little")
    compressor = zstandard.ZstdCompressor(write_checksum=True)

    def check(body: bytes) -> None:
        try:
            group = decode_group(header + compressor.compress(body))
        except PoisonGroup:
            return
        check_group(group)
        for trajectory in group.trajectories:
            assert np.isfinite(np.float32(trajectory.reward)), "the learner computes in float32"

    try_examples(num_examples, damaged(group_to_proto(group_with_experts()).SerializeToString()), check)


@BUDGETS
def test_rewards_and_shapes_that_a_server_made_up_are_poison_or_whole(num_examples: int) -> None:
    header = MAGIC + SCHEMA_VERSION.to_bytes(2, "little")
    compressor = zstandard.ZstdCompressor(write_checksum=True)

    def check(example: tuple[float, bytes, bytes, bytes, list[tuple[int, int]]]) -> None:
        reward, token_ids, loss_mask, log_probs, segments = example
        message = group_to_proto(make_group(7))
        first = message.trajectories[0]
        first.reward, first.token_ids, first.loss_mask, first.log_probs = reward, token_ids, loss_mask, log_probs
        del first.segments[:]
        first.segments.extend(groups_pb2.VersionSegment(start=a, end=b) for a, b in segments)
        try:
            group = decode_group(header + compressor.compress(message.SerializeToString()))
        except PoisonGroup:
            return
        assert np.isfinite(np.float32(group.trajectories[0].reward))

    tokens = st.integers(0, 3).map(lambda n: b"\1\0\0\0" * n)
    masks, probs = st.integers(0, 3).map(lambda n: b"\1" * n), st.binary(max_size=12)
    ends = st.integers(0, 4)
    reward = st.floats() | st.sampled_from([1e300, -1e300, 3.5e38, LARGEST_FLOAT32])
    try_examples(num_examples, st.tuples(reward, tokens, masks, probs, st.lists(st.tuples(ends, ends))), check)


def manifest() -> weights_pb2.WeightManifest:
    tensors = [TensorShape(name, "F32", shape) for name, shape in SHAPES.items()]
    return build_manifest("r", 3, 1, tensors, bucket_bytes=64)


@BUDGETS
def test_a_damaged_manifest_is_refused_or_fits_the_model(num_examples: int) -> None:
    def check(data: bytes) -> None:
        try:
            found = weights_pb2.WeightManifest.FromString(data)
        except DecodeError:
            return
        try:
            check_manifest(found, SHAPES)
        except WeightPushFailed:
            return
        assert {tensor.name for tensor in found.tensors} >= SHAPES.keys() or found.HasField("adapter")

    try_examples(num_examples, damaged(manifest().SerializeToString()), check)


@BUDGETS
def test_a_damaged_snapshot_is_refused_or_has_every_tensor(num_examples: int, tmp_path: Path) -> None:
    kept = manifest()
    buckets = allocate_buckets(kept)
    write_snapshot(tmp_path, kept, buckets, ["0"] * len(buckets))
    whole = {name: (tmp_path / name).read_bytes() for name in (FILE_NAME, MANIFEST_NAME)}

    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        for other, content in whole.items():
            (tmp_path / other).write_bytes(data if other == name else content)
        try:
            found = read_manifest(tmp_path)
            check_manifest(found.manifest, SHAPES)
            read = list(read_snapshot(tmp_path, found.manifest))
        except WeightPushFailed:
            return
        assert [len(bucket) for bucket in read] == [bucket.num_bytes for bucket in found.manifest.buckets]

    examples = st.sampled_from(sorted(whole)).flatmap(lambda name: st.tuples(st.just(name), damaged(whole[name])))
    try_examples(num_examples, examples, check)


@BUDGETS
def test_a_damaged_trainer_file_is_named_or_whole(num_examples: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.finish(store.partial_folder(4, 1), TrainerState(4, 5, 1, [(1, 8)], store_id="s"))
    file = path / TRAINER_FILE
    whole = file.read_bytes()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            state = read_state(path)
            ledger = Ledger(state.ledger)
        except CheckpointDamaged as error:
            assert str(path) in str(error)
            return
        assert data == whole or json.loads(data) == json.loads(whole)
        assert ledger.ranges == [(1, 8)] and state.step == 4

    fields = json.loads(whole)
    replaced = st.tuples(st.sampled_from(sorted(fields)), json_values()).map(
        lambda change: json.dumps({**fields, change[0]: change[1]}).encode()
    )
    try_examples(num_examples, damaged(whole) | replaced, check)


@BUDGETS
def test_a_damaged_config_is_a_line_for_each_wrong_field_or_valid(num_examples: int, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    assert load_config(file).replay.groups_per_step == 8
    whole = CONFIG.encode()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            load_config(file)
        except ConfigError as error:
            assert all(line.startswith(str(file)) for line in str(error).split("\n"))

    check(b"unknown:")  # and the model is missing
    try_examples(num_examples, damaged(whole), check)


@BUDGETS
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_tool_call_is_parsed_or_malformed(num_examples: int, name: str) -> None:
    def check(text: str) -> None:
        for call in TOOL_FORMATS[name](text):
            assert isinstance(call, ToolCall | MalformedCall)
            if isinstance(call, ToolCall):
                assert isinstance(call.name, str) and isinstance(call.arguments, dict)

    calls = st.builds(
        lambda value, before, after: before + json.dumps(value) + after,
        st.fixed_dictionaries(
            {"name": json_values()}, optional={"arguments": json_values(), "parameters": json_values()}
        )
        | st.fixed_dictionaries({"tool_calls": json_values()}),
        st.sampled_from(["", "<tool_call>", "<|python_tag|>", "text "]),
        st.sampled_from(["", "</tool_call>", "; ", "}"]),
    )
    try_examples(num_examples, calls | st.text(max_size=80) | st.just("[" * 100_000), check)


@BUDGETS
def test_a_reward_is_finite_in_float32_or_refused(num_examples: int) -> None:
    def check(score: Any) -> None:
        try:
            reward, parts, *_ = read_score(score)
        except ValueError:
            return
        assert np.isfinite(np.float32(reward)) and all(math.isfinite(part) for part in parts.values())

    numbers = st.integers() | st.floats() | st.decimals() | st.fractions() | st.just(10**400) | st.just(1e300)
    named = st.dictionaries(st.just("score") | st.text(max_size=5), numbers, max_size=3)
    try_examples(num_examples, numbers | named | st.lists(numbers, max_size=2) | json_values(), check)


@BUDGETS
def test_rules_score_any_text(num_examples: int) -> None:
    def check(example: tuple[str, Any, dict[str, Any]]) -> None:
        text, truth, extra = example
        scores = [
            exact_match("s", text, truth, extra),
            gsm8k("s", text, truth, extra, method="flexible", correct_score=1.0, format_score=0.0),
            gsm8k("s", text, truth, extra, method="strict", correct_score=1.0, format_score=0.0),
            regex("s", text, truth, extra, pattern=r"answer: (\S+)", ignore_case=True),
        ]
        assert set(scores) <= {0.0, 1.0}

    texts = st.text(max_size=60) | st.text("0123456789.,-$# ", max_size=60)
    try_examples(num_examples, st.tuples(texts, json_values(), st.dictionaries(st.text(), json_values())), check)
