"""A member of the weight group in this process: the gRPC service with a torch engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2_grpc
from penstock.weights.transports import host_id
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.engines.engine import Engine, GenerateRequest
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener
from penstock_rollout.metrics import RolloutMetrics
from support.learner_runs import make_config

HOST = "127.0.0.1"


def config_of(folder: Path, model: Path, key_file: Path | None, transport: str = "gloo") -> RunConfig:
    config = make_config(folder, model, "redis://unused", "push")
    weights = config.weights.model_copy(
        update={"transport": transport, "cluster_key_file": key_file, "ready_timeout_s": 60.0, "push_timeout_s": 60.0}
    )
    return config.model_copy(update={"weights": weights})


@contextlib.asynccontextmanager
async def member(config: RunConfig) -> AsyncIterator[tuple[PushTarget, Engine, WeightMember]]:
    """Serve a torch engine as a member of term 1. Yields its target, the engine and the service."""
    engine = create_engine(EngineConfig(name="torch", max_model_len=64), config.model.path, "float32", 0)
    await engine.start(policy_version=0)
    servicer = WeightMember(
        "push", engine, RolloutMetrics(CollectorRegistry()), read_term=lambda: asyncio.sleep(0, result=1)
    )
    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)
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


async def greedy_log_probs(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    sampling = Sampling(temperature=0.0, max_tokens=6)
    tokens: list[int] = []
    log_probs: list[float] = []
    async for chunk in engine.generate(GenerateRequest("r", prompt, sampling)):
        tokens += chunk.token_ids
        log_probs += chunk.log_probs
    return tokens, log_probs
