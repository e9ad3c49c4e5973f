"""The publisher against real members: gRPC, gloo or a snapshot, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from learner_runs import make_config
from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig
from penstock.ports import free_port
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2_grpc
from penstock.weights.patience import Patience
from penstock.weights.transports import host_id
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders.sender import PushTarget
from penstock_rollout.engines.choose import create_engine
from penstock_rollout.engines.engine import Engine, GenerateRequest
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.receivers.available import available_transports
from penstock_rollout.weight_member import WeightMember
from tiny_model import make_tiny_qwen2

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_qwen2(folder / "old", seed=1), make_tiny_qwen2(folder / "new", seed=2)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.write_text("a key")
    return path


def config_of(folder: Path, model: Path, key_file: Path | None, transport: str = "gloo") -> RunConfig:
    config = make_config(folder, model, "redis://unused", "push")
    weights = config.weights.model_copy(
        update={"transport": transport, "cluster_key_file": key_file, "ready_timeout_s": 5.0, "push_timeout_s": 20.0}
    )
    return config.model_copy(update={"weights": weights})


@contextlib.asynccontextmanager
async def member(config: RunConfig) -> AsyncIterator[tuple[PushTarget, Engine, WeightMember]]:
    """A rollout server's weight listener with a torch engine behind it."""
    engine = create_engine(EngineConfig(name="torch", max_model_len=64), config.model.path, "float32", 0)
    await engine.start(policy_version=0)
    servicer = WeightMember("push", engine, config.weights, RolloutMetrics(CollectorRegistry()))
    listener = grpc.aio.server()
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(servicer, listener)
    port = listener.add_insecure_port(f"{HOST}:0")
    await listener.start()
    try:
        yield (
            PushTarget(f"server-{port}", f"{HOST}:{port}", host_id=host_id(), transports=available_transports(["cpu"])),
            engine,
            servicer,
        )
    finally:
        await listener.stop(None)
        await engine.stop()


def publisher_of(config: RunConfig, model: Path, version: int = 1, term: int = 1) -> WeightPublisher:
    """A publisher that holds the weights of a model folder as `version`."""
    weights = list(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    publisher = WeightPublisher(config, HOST)
    staged = publisher.begin(version, term, [(name, tuple(weight.shape)) for name, weight in weights])
    for name, weight in weights:
        staged.put(name, weight.detach())
    return publisher


async def greedy_log_probs(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    sampling = Sampling(temperature=0.0, max_tokens=6)
    tokens: list[int] = []
    log_probs: list[float] = []
    async for chunk in engine.generate(GenerateRequest("r", prompt, sampling)):
        tokens += chunk.token_ids
        log_probs += chunk.log_probs
    return tokens, log_probs


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
    async with member(config_of(tmp_path, old, key_file)) as (target, engine, _):
        intruder = publisher_of(config_of(tmp_path, old, None), new)
        report = await asyncio.to_thread(intruder.push, 1, [target])
        assert "UNAUTHENTICATED" in report.failed[target.server_id]
        assert engine.policy_version == 0


async def test_a_publisher_of_an_older_term_is_refused(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    async with member(config) as (target, engine, _):
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


async def test_corrupt_buckets_are_refused_and_the_old_version_serves_on(
    tmp_path: Path, models: tuple[Path, Path], key_file: Path
) -> None:
    old, new = models
    config = config_of(tmp_path, old, key_file)
    async with member(config) as (target, engine, _):
        publisher = publisher_of(config, new)
        publisher.staged[1].checksums(Patience(10, "hashing"))
        publisher.staged[1].memory.buckets[0][100] ^= 1
        report = await asyncio.to_thread(publisher.push, 1, [target])
        assert "bucket 0 is corrupt" in report.failed[target.server_id]
        assert engine.policy_version == 0
        tokens, _ = await greedy_log_probs(engine, (5, 6, 7))
        assert tokens == expected_greedy(old, (5, 6, 7), len(tokens))
