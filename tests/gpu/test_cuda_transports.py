"""cuda_ipc on a real GPU, with CuPy: checksums, two processes, and a push into an engine."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("these tests need a CUDA GPU", allow_module_level=True)
pytest.importorskip("cupy", reason="these tests need CuPy")

from penstock.v1 import weights_pb2
from penstock.weights.cuda import device_mix64
from penstock.weights.transports import MIX64, Deadline, TensorShape, build_manifest, host_checksum
from penstock_learner.weights.senders import CudaIpcSender, PushTarget, Shipment
from penstock_learner.weights.staging import DeviceBuckets, MemoryPool, StagedVersion, checksum_name
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.stage import WeightStage

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 60.0
HOST = "127.0.0.1"


def deadline(timeout_s: float = TIMEOUT_S) -> Deadline:
    return Deadline(timeout_s, "a test")


@pytest.mark.parametrize("num_bytes", [0, 16, 48, 4096 + 16, 16 * 65_537, 64 * 2**20 + 48])
def test_the_gpu_computes_the_same_checksum(num_bytes: int) -> None:
    bucket = torch.from_numpy(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8))
    on_gpu = bucket.to(DEVICE)
    torch.cuda.synchronize()
    assert device_mix64(on_gpu.data_ptr(), num_bytes, 0) == host_checksum(MIX64, bucket.numpy())


def test_device_memory_is_zeroed_and_aligned() -> None:
    pool = MemoryPool(DEVICE)
    for _ in range(2):
        memory = pool.take("device", [48, 16, 1024 * 1024 + 16])
        assert all(bucket.is_cuda and bucket.data_ptr() % 512 == 0 for bucket in memory.buckets)
        assert all(not bucket.any() for bucket in memory.buckets)
        for bucket in memory.buckets:
            bucket.fill_(255)
        torch.cuda.synchronize()
        pool.give_back(memory)


class IpcPublisher:
    """Runs in a separate process, because CUDA does not map memory of the same process."""

    def __init__(self) -> None:
        shapes = [TensorShape(f"w{index}", "BF16", (1000 + index, 64)) for index in range(40)]
        manifest = build_manifest("run", 1, 1, shapes, bucket_bytes=2**20)
        memory = DeviceBuckets([bucket.num_bytes for bucket in manifest.buckets], DEVICE)
        manifest.checksum = checksum_name(memory)
        self._staged = StagedVersion(manifest, memory)
        self._shipment = Shipment(manifest, self._staged)
        self._sender = CudaIpcSender(DEVICE)

    def offer(self) -> tuple[bytes, str]:
        rendezvous = self._sender.open(self._shipment, [], deadline())
        return self._staged.manifest.SerializeToString(), rendezvous

    def fill_and_send(self) -> list[str]:
        """Fill the buckets while the member waits, so that it copies each one as it becomes ready."""
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self._sender.send, self._shipment, [], deadline())
            for spec in self._staged.manifest.tensors:
                self._staged.put(spec.name, torch.rand(tuple(spec.shape), device=DEVICE))
            sent.result(TIMEOUT_S)
        return self._staged.checksums(deadline())


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_cuda_ipc_between_two_processes(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "cpu":
        monkeypatch.setattr(stage_module, "SPARE_DEVICE_BYTES", 2**60)
    with child(IpcPublisher) as call:
        manifest, rendezvous = call("offer")
        announcement = weights_pb2.AnnounceRequest(
            manifest=weights_pb2.WeightManifest.FromString(manifest), transport="cuda_ipc", rendezvous=rendezvous,
            rank=1, world_size=2, deadline_s=TIMEOUT_S,
        )  # fmt: skip
        stage = WeightStage(announcement, Path("unused"), device=DEVICE)
        stage.start()
        checksums = call("fill_and_send")
        stage.done.result(TIMEOUT_S)
    assert stage.phase == "received", stage.failure
    assert {bucket.device.type for bucket in stage.buckets} == {where}
    assert stage.mismatch(checksums) == ""


class Learner:
    """A publisher with the weights of a model folder on the GPU."""

    def __init__(self, config: dict[str, Any], model: str) -> None:
        from transformers import AutoModelForCausalLM

        from penstock.config.loading import validate
        from penstock_learner.weights.publisher import WeightPublisher

        weights = list(AutoModelForCausalLM.from_pretrained(model).to(DEVICE).named_parameters())
        self._publisher = WeightPublisher(validate(config, "test"), HOST, DEVICE)
        staged = self._publisher.begin(1, 1, [(name, tuple(weight.shape)) for name, weight in weights])
        for name, weight in weights:
            staged.put(name, weight.detach())

    def push(self, target: PushTarget) -> tuple[str, list[str], dict[str, str]]:
        report = self._publisher.push(1, [target])
        return report.transport, report.committed, report.failed


def test_a_push_into_an_engine_on_the_same_gpu(tmp_path: Path) -> None:
    from support.tiny_models import make_tiny_qwen2

    old, new = make_tiny_qwen2(tmp_path / "old", seed=1), make_tiny_qwen2(tmp_path / "new", seed=2)
    config = {"run": "push", "run_dir": str(tmp_path), "model": {"path": str(old)}}
    with child(Learner, config, str(new)) as call:
        found = asyncio.run(_push_to_torch_engine(config, old, call))
    assert found == _greedy(new, (5, 6, 7), len(found)) != _greedy(old, (5, 6, 7), len(found))


async def _push_to_torch_engine(config: dict[str, Any], model: Path, call: Callable[..., Any]) -> list[int]:
    """The tokens that the engine generates after the push."""
    from prometheus_client import CollectorRegistry

    from penstock.config.loading import validate
    from penstock.config.rollout import EngineConfig
    from penstock.internal_calls import ClusterKey
    from penstock.trajectory import Sampling
    from penstock.v1 import weights_pb2_grpc
    from penstock.weights.transports import host_id
    from penstock_rollout.engines.engine import GenerateRequest
    from penstock_rollout.engines.torch.engine import TorchEngine
    from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener
    from penstock_rollout.metrics import RolloutMetrics

    engine = TorchEngine(EngineConfig(name="torch", max_model_len=64), model, "float32", 0)
    await engine.start(policy_version=0)
    key = ClusterKey.of(validate(config, "test"))
    key.make_if_missing()
    listener = make_listener(key)
    metrics = RolloutMetrics(CollectorRegistry())
    servicer = WeightMember("push", engine, metrics, read_term=lambda: asyncio.sleep(0, result=1))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(servicer, listener)
    port = listener.add_insecure_port(f"{HOST}:0")
    await listener.start()
    try:
        target = PushTarget("member", f"{HOST}:{port}", engine.devices, host_id(), available_transports(engine.devices))
        assert await asyncio.to_thread(call, "push", target) == ("cuda_ipc", ["member"], {})
        request = GenerateRequest("r", (5, 6, 7), Sampling(temperature=0.0, max_tokens=6))
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]
    finally:
        await listener.stop(None)
        await engine.stop()


def _greedy(model: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(model)
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@contextmanager
def child(make: Callable[..., Any], *arguments: Any) -> Iterator[Callable[..., Any]]:
    """Make an object in a separate process. Yields a function that calls its methods."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
    process.start()

    def call(method: str, *arguments: Any) -> Any:
        ours.send((method, arguments))
        assert ours.poll(TIMEOUT_S), f"{method} does not answer"
        answer, failure = ours.recv()
        assert not failure, failure
        return answer

    try:
        yield call
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served: Any = None
    while True:
        method, given = pipe.recv()
        try:
            served = served or make(*arguments)
            pipe.send((getattr(served, method)(*given), ""))
        except Exception as error:
            pipe.send((None, repr(error)))
