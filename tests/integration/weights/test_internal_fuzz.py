"""Random and damaged bytes to the internal port of a rollout server: it keeps its version, and goes on serving."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from penstock.config.rollout import EngineConfig
from penstock.internal_calls import KEY_HEADER, ClusterKey
from penstock.v1 import generate_pb2, generate_pb2_grpc, prompts_pb2, weights_pb2, weights_pb2_grpc
from penstock.weights.transports import TensorShape, build_manifest
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.fleet.membership import WeightMember, make_listener
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization
from support.engine_member import greedy_log_probs
from support.fleet_runs import EXAMPLE
from support.fuzzing import answer_of, damaged_requests, methods_of, path_of, whole_request

FAULTS_OF_THE_SERVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
NO_MESSAGE = "DecodeError"
"""In grpc's own answer to bytes that are no message."""
SERVED = ("WeightMemberService", "GenerateService")


def whole_requests(engine: Any, folder: Path) -> dict[str, Any]:
    tensors = [TensorShape(name, "F32", shape) for name, shape in engine._shapes.items()]
    announced = weights_pb2.AnnounceRequest(
        manifest=build_manifest("fuzz", 7, 1, tensors, bucket_bytes=2**20),
        transport="snapshot",
        rendezvous=str(folder / "none"),
        rank=1,
        world_size=2,
        deadline_s=0.5,
    )
    return {
        "AnnounceRequest": announced,
        "CommitRequest": weights_pb2.CommitRequest(
            policy_version=7, term=1, bucket_checksums=["0"] * len(announced.manifest.buckets), deadline_s=0.5
        ),
        "AbortRequest": weights_pb2.AbortRequest(policy_version=7, term=1, reason="r"),
        "GenerateRequest": generate_pb2.GenerateRequest(
            token_ids=b"\2\0\0\0\3\0\0\0", sampling=prompts_pb2.Sampling(temperature=1, top_p=0.5, max_tokens=2)
        ),
    }


def wrong_requests(whole: dict[str, Any]) -> list[tuple[str, Any]]:
    """Requests with numbers that would never let a push end, or would end the engine, by method."""

    def changed(name: str, **fields: Any) -> Any:
        request = type(whole[name]).FromString(whole[name].SerializeToString())
        request.MergeFrom(type(request)(**fields))
        return request

    samplings = [{"temperature": math.nan}, {"temperature": -1}, {"top_p": 2}, {"max_tokens": -1}]
    return [
        *(("Announce", changed("AnnounceRequest", deadline_s=value)) for value in (math.inf, math.nan, -1, 1e300)),
        *(("Commit", changed("CommitRequest", deadline_s=value)) for value in (math.inf, math.nan)),
        *(("Generate", changed("GenerateRequest", sampling=prompts_pb2.Sampling(**each))) for each in samplings),
        ("Generate", changed("GenerateRequest", token_ids=b"\1\2\3")),
    ]


@pytest.mark.parametrize("num_examples", [4, pytest.param(400, marks=pytest.mark.long)])
async def test_damaged_calls_change_nothing_and_end_nothing(tmp_path: Path, num_examples: int) -> None:
    engine: Any = create_engine(EngineConfig(name="torch", max_model_len=64), EXAMPLE / "model", "float32", 0)
    await engine.start(policy_version=3)
    metrics = RolloutMetrics(CollectorRegistry())
    member = WeightMember("fuzz", engine, metrics, read_term=lambda: asyncio.sleep(0, result=1))
    (tmp_path / "key").write_text("secret")
    listener = make_listener(ClusterKey(tmp_path / "key", may_make=False))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    generation = GenerateService("fuzz", "s", engine, Tokenization(EXAMPLE / "model"), 64)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(generation, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    answer = await greedy_log_probs(engine, (2, 3, 4))
    whole, key = whole_requests(engine, tmp_path), ((KEY_HEADER, "secret"),)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in (*methods_of(weights_pb2), *methods_of(generate_pb2)):
                if method.containing_service.name not in SERVED:
                    continue
                for data in damaged_requests(whole_request(method, whole), num_examples):
                    code, details = await answer_of(channel, method, data, key, timeout_s=60.0)
                    is_fault = code in FAULTS_OF_THE_SERVER and NO_MESSAGE not in details
                    assert not is_fault and code != grpc.StatusCode.DEADLINE_EXCEEDED, (path_of(method), data, details)
            methods = {method.name: method for method in (*methods_of(weights_pb2), *methods_of(generate_pb2))}
            for name, request in wrong_requests(whole):
                code, details = await answer_of(channel, methods[name], request.SerializeToString(), key, 60.0)
                assert code == grpc.StatusCode.INVALID_ARGUMENT, (name, request, details)
            last = weights_pb2.AbortRequest(policy_version=member.announced_version or 0, term=1)
            await weights_pb2_grpc.WeightMemberServiceStub(channel).Abort(last, metadata=key)
        await engine.check_health()
        assert (engine.policy_version, engine.weights_digest) == (3, "")
        assert not member.is_receiving
        assert await greedy_log_probs(engine, (2, 3, 4)) == answer
    finally:
        await listener.stop(None)
        await engine.stop()
