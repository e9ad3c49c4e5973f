"""Measures the pause of vLLM on this machine: it generates while versions are pushed to it by the real service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from harness import Measurement
from penstock.config.loading import validate
from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock.weights.transports import host_id
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.engines.engine import Engine, GenerateRequest
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.fleet.membership import available_transports
from penstock_rollout.fleet.weight_member import WeightMember
from penstock_rollout.metrics import RolloutMetrics

NUM_PUSHES = 8
NUM_REQUESTS = 16


def make_model(folder: Path) -> Any:
    """A Qwen2 of about 200 MB in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16_000, hidden_size=640, intermediate_size=2560, num_hidden_layers=6, num_attention_heads=10,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


async def measure(folder: Path) -> tuple[Measurement, Measurement]:
    """Rates (1/s) of the pause and of the engine's load, one per push."""
    model = make_model(folder)
    config = validate({"run": "bench", "run_dir": str(folder), "model": {"path": str(folder)}}, "bench")
    engine_config = EngineConfig(name="vllm", max_model_len=512, kv_cache_bytes=256 * 2**20)
    engine = create_engine(engine_config, folder, "float32", 0)
    await engine.start(policy_version=0)
    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)
    metrics = RolloutMetrics(CollectorRegistry())
    member = WeightMember("bench", engine, metrics, read_term=lambda: asyncio.sleep(0, result=1))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    target = PushTarget("vllm", f"127.0.0.1:{port}", ("cpu",), host_id(), available_transports(("cpu",)))
    pauses, loads = Measurement("vLLM: 1 / pause", "1/s"), Measurement("vLLM: 1 / load", "1/s")
    generating = [asyncio.create_task(_generate(engine, index)) for index in range(NUM_REQUESTS)]
    try:
        publisher = WeightPublisher(config, "127.0.0.1")
        for version in range(1, NUM_PUSHES + 1):
            await asyncio.to_thread(_stage, publisher, version, model)
            outcome = await asyncio.to_thread(publisher.push, version, [target])
            assert outcome.committed, outcome.failed
            assert outcome.running_requests > 0, "nothing was generating"
            if version > 1:
                pauses.rates.append(1 / outcome.seconds["pause"])
                loads.rates.append(1 / outcome.seconds["load"])
    finally:
        for task in generating:
            task.cancel()
        await asyncio.gather(*generating, return_exceptions=True)
        await listener.stop(None)
        await engine.stop()
    return pauses, loads


def _stage(publisher: WeightPublisher, version: int, model: Any) -> None:
    weights = list(model.named_parameters())
    shapes = [(name, tuple(weight.shape)) for name, weight in weights]
    staged = publisher.begin(version, 1, shapes, keep=[version - 1])
    for name, weight in weights:
        staged.put(name, weight.detach())


async def _generate(engine: Engine, index: int) -> None:
    """Send requests one after the other, for ever."""
    number = 0
    while True:
        number += 1
        request = GenerateRequest(f"{index}.{number}", tuple(range(2, 34)), Sampling(max_tokens=256))
        async for _ in engine.generate(request):
            pass
