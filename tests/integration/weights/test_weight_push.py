"""The publisher with real members: gRPC, gloo or a snapshot, and members that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock.internal_calls import ClusterKey
from penstock.machine import free_port
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.transports import Deadline, TensorShape, build_manifest
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from support.engine_member import HOST, config_of, greedy_log_probs, member
from support.tiny_models import make_tiny_qwen2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_qwen2(folder / "old", seed=1), make_tiny_qwen2(folder / "new", seed=2)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.write_text("a key")
    return path


def publisher_of(config: RunConfig, model: Path, version: int = 1, term: int = 1) -> WeightPublisher:
    """Return a publisher that has staged the weights of a model folder as `version`."""
    weights = list(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    publisher = WeightPublisher(config, HOST)
    staged = publisher.begin(version, term, [(name, tuple(weight.shape)) for name, weight in weights])
    for name, weight in weights:
        staged.put(name, weight.detach())
    return publisher


def expected_greedy(model: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    lm: Any = AutoModelForCausalLM.from_pretrained(model)
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("transport", ["gloo", "shm", "snapshot"])
async def test_two_members_serve_the_new_version(
    transport: str, tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file, transport)
    async with member(config) as (first, engine, _), member(config) as (second, other, _):
        report = await asyncio.to_thread(publisher_of(config, new).push, 1, [first, second])
        assert report.committed == sorted([first.server_id, second.server_id])
        assert report.failed == {}
        assert engine.policy_version == other.policy_version == 1
        assert engine.weights_digest == other.weights_digest == report.weights_digest != ""
        tokens, _ = await greedy_log_probs(engine, (5, 6, 7))
        assert tokens == expected_greedy(new, (5, 6, 7), len(tokens)) != expected_greedy(old, (5, 6, 7), len(tokens))
    assert not list(tmp_path.glob("push/pushes/*/*")), "a pushed snapshot is removed once everyone has read it"


@pytest.mark.parametrize("transport", ["gloo", "shm", "snapshot"])
@pytest.mark.fault_row(
    "weights",
    "weights that are not finite, by {transport}",
    how="NaN in a tensor of the learner",
    must="no server ever gets them",
)
async def test_weights_that_are_not_finite_reach_no_server(
    transport: str, tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    """The buckets may be sent before the last one is checked, but no member is told to commit them."""
    old, _ = models
    config = config_of(tmp_path, old, key_file, transport)
    bad = AutoModelForCausalLM.from_pretrained(old)
    with torch.no_grad():
        bad.model.layers[-1].mlp.up_proj.weight[3, 4] = float("nan")
    bad.save_pretrained(tmp_path / "bad")
    async with member(config) as (target, engine, _):
        report = await asyncio.to_thread(publisher_of(config, tmp_path / "bad").push, 1, [target])
        assert report.nonfinite == "model.layers.1.mlp.up_proj.weight"
        assert (report.committed, report.failed, report.weights_digest) == ([], {}, "")
        assert engine.policy_version == 0
        report = await asyncio.to_thread(publisher_of(config, old, version=2).push, 2, [target])
        assert report.committed == [target.server_id], "the member takes the next version"


async def test_a_member_that_is_not_there_leaves_the_push_and_the_others_get_it(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    gone = PushTarget("gone", f"{HOST}:{free_port()}")
    async with member(config) as (alive, engine, _):
        report = await asyncio.to_thread(publisher_of(config, new).push, 1, [gone, alive])
        assert report.committed == [alive.server_id]
        assert list(report.failed) == ["gone"]
        assert engine.policy_version == 1


async def test_a_publisher_without_the_key_is_refused(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    other_key = tmp_path / "other.key"
    other_key.write_text("another key")
    async with member(config_of(tmp_path, old, key_file)) as (target, engine, _):
        intruder = publisher_of(config_of(tmp_path, old, other_key), new)
        report = await asyncio.to_thread(intruder.push, 1, [target])
        assert "UNAUTHENTICATED" in report.failed[target.server_id]
        assert engine.policy_version == 0


async def test_a_publisher_of_an_older_term_is_refused(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    async with member(config) as (target, engine, servicer):
        servicer.read_term = lambda: asyncio.sleep(0, result=2)
        await asyncio.to_thread(publisher_of(config, new, version=5, term=2).push, 5, [target])
        report = await asyncio.to_thread(publisher_of(config, old, version=6, term=1).push, 6, [target])
        assert "term 1 has passed" in report.failed[target.server_id]
        assert engine.policy_version == 5


async def test_a_member_that_has_just_started_knows_the_term_from_the_registry(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    async with member(config) as (target, engine, servicer):
        servicer.read_term = lambda: asyncio.sleep(0, result=2)
        report = await asyncio.to_thread(publisher_of(config, new, term=1).push, 1, [target])
        assert "term 1 has passed" in report.failed[target.server_id]
        assert engine.policy_version == 0
        report = await asyncio.to_thread(publisher_of(config, new, version=2, term=2).push, 2, [target])
        assert report.committed == [target.server_id]


async def test_a_call_with_a_huge_term_does_not_lock_the_learner_out(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    """Not even a caller with the key can move the term: only the registry's counts."""
    old, new = models
    config = config_of(tmp_path, old, key_file)
    abort = weights_pb2.AbortRequest(policy_version=1, term=2**62, reason="a stranger")
    async with member(config) as (target, engine, servicer):
        async with grpc.aio.insecure_channel(target.address) as channel:
            stub: Any = weights_pb2_grpc.WeightMemberServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="wrong or missing cluster key"):
                await stub.Abort(abort, timeout=60)
            with pytest.raises(grpc.aio.AioRpcError, match="was never taken; the current one is 1"):
                await stub.Abort(abort, timeout=60, metadata=ClusterKey.of(config).metadata())
        report = await asyncio.to_thread(publisher_of(config, new).push, 1, [target])
        assert report.committed == [target.server_id]
        servicer.read_term = unanswered
        report = await asyncio.to_thread(publisher_of(config, old, version=2).push, 2, [target])
        assert report.committed == [target.server_id], "the registry's last answer counts while it does not answer"


async def test_a_run_without_a_configured_key_makes_one_that_only_its_owner_can_read(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file=None)
    async with member(config) as (target, _, _):
        async with grpc.aio.insecure_channel(target.address) as channel:
            stub: Any = weights_pb2_grpc.WeightMemberServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="wrong or missing cluster key"):
                await stub.Abort(weights_pb2.AbortRequest(policy_version=1, term=1), timeout=60)
        report = await asyncio.to_thread(publisher_of(config, new).push, 1, [target])
        assert report.committed == [target.server_id]
    [made] = config.folder.glob("cluster.key")
    assert made.stat().st_mode & 0o777 == 0o600
    assert len(made.read_text()) == 64


async def test_a_message_is_not_parsed_before_the_key_is_checked(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    config = config_of(tmp_path, models[0], key_file)
    async with member(config) as (target, _, _), grpc.aio.insecure_channel(target.address) as channel:
        announce = channel.unary_unary("/penstock.v1.WeightMemberService/Announce")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await announce(b"\xff" * 1000, timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def unanswered() -> int:
    raise Unavailable("Redis does not answer")


async def test_corrupt_buckets_are_refused_and_the_old_version_serves_on(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    async with member(config) as (target, engine, _):
        publisher = publisher_of(config, new)
        publisher.staged[1].checksums(Deadline(60, "hashing"))
        publisher.staged[1].memory.buckets[0][100] ^= 1
        report = await asyncio.to_thread(publisher.push, 1, [target])
        assert "bucket 0 is corrupt" in report.failed[target.server_id]
        assert engine.policy_version == 0
        tokens, _ = await greedy_log_probs(engine, (5, 6, 7))
        assert tokens == expected_greedy(old, (5, 6, 7), len(tokens))


@pytest.mark.fault_row(
    "weights", "reordered calls", how="the commit of a version arrives after a newer one was announced",
    must="it is refused, and the old version serves on",
)  # fmt: skip
async def test_a_commit_that_comes_after_a_newer_announcement_is_refused(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    config = config_of(tmp_path, models[0], key_file)
    async with member(config) as (target, engine, servicer), grpc.aio.insecure_channel(target.address) as channel:
        shapes: Any = AutoModelForCausalLM.from_pretrained(models[0]).named_parameters()
        tensors = [TensorShape(name, "F32", tuple(weight.shape)) for name, weight in shapes]
        stub: Any = weights_pb2_grpc.WeightMemberServiceStub(channel)
        metadata = ClusterKey.of(config).metadata()
        for version in (1, 2):
            manifest = build_manifest("push", version, 1, tensors, bucket_bytes=2**16)
            announced = weights_pb2.AnnounceRequest(
                manifest=manifest, transport="snapshot", rendezvous=str(tmp_path / "never"), deadline_s=60
            )
            await stub.Announce(announced, metadata=metadata)
        late = weights_pb2.CommitRequest(policy_version=1, term=1, bucket_checksums=["0"], deadline_s=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Commit(late, metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.ABORTED and "version 1" in (caught.value.details() or "")
        assert engine.policy_version == 0
        assert servicer.is_receiving, "the push of version 2 goes on"
