"""Compares the weight push on one machine with the limit of its transport, and measures the pause of generation.

    make bench-weights

A push is timed from weights in training memory to a version that every member has received, verified and committed.
Staging and sending overlap as they do in a run. Members are processes with the real gRPC service and stage; loading
into an engine is measured separately, with vLLM. The limits are measured in the same rounds: a memory copy of the same
bytes for shm, and a plain TCP stream of the same bytes between two processes for gloo. Copies use as many threads as a
rank of the learner has.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from harness import SMOKE, Bar, Measurement, alternate, make_parser, median_ratio, report, report_skipped, sized
from penstock.config.learner import LearnerConfig
from penstock.config.loading import dump_config, validate
from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2_grpc
from penstock.weights.transports import host_id
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.engines.engine import Engine, GenerateRequest
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener
from penstock_rollout.metrics import RolloutMetrics
from support.weight_group import MemberProcess

NUM_PUSHES = sized(8, 2)
NUM_REQUESTS = 16
HIDDEN = sized(640, 80)


def make_model(folder: Path) -> Any:
    """A Qwen2 of about 200 MB in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16_000, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=6,
        num_attention_heads=10, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


async def measure_pause(folder: Path) -> tuple[Measurement, Measurement]:
    """Rates (1/s) of the pause and of the engine's load, one per push."""
    model = make_model(folder)
    config = validate({"run": "bench", "run_dir": str(folder), "model": {"path": str(folder)}}, "bench")
    engine_config = EngineConfig(name=sized("vllm", "torch"), max_model_len=512, kv_cache_bytes=256 * 2**20)
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
    """Send requests one after the other, forever."""
    number = 0
    while True:
        number += 1
        request = GenerateRequest(f"{index}.{number}", tuple(range(2, 34)), Sampling(max_tokens=256))
        async for _ in engine.generate(request):
            pass


MODEL_BYTES = sized(2**30, 2**24)
NUM_TENSORS = 64
NUM_ROUNDS = sized(5, 1)
FLAT_PUSHES = 30
SHAPES = [(f"layer.{index}.weight", (MODEL_BYTES // 4 // NUM_TENSORS // 1024, 1024)) for index in range(NUM_TENSORS)]


def config_of(folder: Path, transport: str) -> RunConfig:
    weights = {"transport": transport}
    return validate(
        {"run": "bench", "run_dir": str(folder), "model": {"path": str(folder)}, "weights": weights}, "bench"
    )


class Pusher:
    """A publisher and its members. `push` pushes one version from start to finish."""

    def __init__(self, folder: Path, transport: str, num_members: int, weights: list[torch.Tensor]) -> None:
        folder.mkdir()
        config = config_of(folder, transport)
        file = folder / "config.yaml"
        file.write_text(dump_config(config))
        self.members = [
            MemberProcess.start(file, folder / f"member-{index}", is_quiet=True) for index in range(num_members)
        ]
        self.targets = [member.target for member in self.members]
        self.publisher = WeightPublisher(config, "127.0.0.1")
        self.weights = weights
        self.version = 0

    def push(self) -> float:
        """Push one version. Returns the seconds it took."""
        self.version += 1
        started = time.perf_counter()
        staging = threading.Thread(target=self._stage)
        staging.start()
        outcome = self.publisher.push(self.version, self.targets)
        staging.join()
        assert len(outcome.committed) == len(self.targets), outcome
        return time.perf_counter() - started

    def _stage(self) -> None:
        """Copy every weight to its bucket, as the training thread does."""
        shapes = [(name, tuple(weight.shape)) for (name, _), weight in zip(SHAPES, self.weights, strict=False)]
        staged = self.publisher.begin(self.version, 1, shapes, keep=[self.version - 1])
        for (name, _), weight in zip(shapes, self.weights, strict=True):
            staged.put(name, weight)

    def stop(self) -> None:
        for member in self.members:
            member.kill()


def make_weights(num_bytes: int) -> list[torch.Tensor]:
    one = torch.randn(MODEL_BYTES // 4 // NUM_TENSORS // 1024, 1024)
    return [one + index for index in range(max(1, num_bytes * NUM_TENSORS // MODEL_BYTES))]


def memory_copy(weights: list[torch.Tensor]) -> Callable[[], float]:
    """GB/s of copying the same bytes into memory that was used before."""
    copies = [torch.empty_like(weight) for weight in weights]
    for copy in copies:
        copy.zero_()

    def run() -> float:
        started = time.perf_counter()
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight)
        return MODEL_BYTES / 1e9 / (time.perf_counter() - started)

    return run


def _drain(port: int) -> None:
    """The reading end of the TCP limit. It reads as many bytes as the model has, into memory that was used before, and
    then sends one byte back."""
    buffer = bytearray(64 * 2**20)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            left = MODEL_BYTES
            while left:
                count = connection.recv_into(memoryview(buffer)[: min(left, len(buffer))])
                if count == 0:
                    return
                left -= count
            connection.sendall(b"x")


def tcp_stream(weights: list[torch.Tensor]) -> tuple[Callable[[], float], Callable[[], None]]:
    """GB/s of sending the same bytes over loopback, and a function that ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    context: Any = multiprocessing.get_context(sized("spawn", "fork"))
    reader = context.Process(target=_drain, args=(listener.getsockname()[1],), daemon=True)
    reader.start()
    connection, _ = listener.accept()
    views = [weight.numpy().reshape(-1).view(np.uint8).data for weight in weights]

    def run() -> float:
        started = time.perf_counter()
        for view in views:
            connection.sendall(view)
        connection.recv(1)
        return MODEL_BYTES / 1e9 / (time.perf_counter() - started)

    def stop() -> None:
        connection.close()
        listener.close()
        reader.join(10)

    return run, stop


def transfers(folder: Path) -> tuple[list[Measurement], list[Bar]]:
    weights = make_weights(MODEL_BYTES)
    tcp, stop_tcp = tcp_stream(weights)
    pushers = {
        "shm, 1 member": Pusher(folder / "shm", "shm", 1, weights),
        "shm, 8 members": Pusher(folder / "shm8", "shm", sized(8, 2), weights),
        "gloo, 1 member": Pusher(folder / "gloo", "gloo", 1, weights),
    }

    def rate(pusher: Pusher) -> Callable[[], float]:
        return lambda: MODEL_BYTES / 1e9 / pusher.push()

    contenders = {"memory copy": memory_copy(weights), "TCP stream": tcp}
    contenders |= {f"push by {name}": rate(pusher) for name, pusher in pushers.items()}
    for pusher in pushers.values():
        pusher.push()  # use both sets of buckets once before anything is measured
    try:
        measured = alternate(contenders, NUM_ROUNDS, "GB/s")
    finally:
        stop_tcp()
        for pusher in pushers.values():
            pusher.stop()
    one, eight, gloo = (measured[f"push by {name}"] for name in pushers)
    bars = [
        Bar("shm, 1 GB: push / memory copy", median_ratio(one, measured["memory copy"]), 0.6),
        Bar(
            "gloo, 1 GB: push / TCP stream",
            median_ratio(measured["push by gloo, 1 member"], measured["TCP stream"]),
            0.6,
        ),
        Bar("shm, 1 GB: seconds of 8 members / 1", median_ratio(one, eight), 1.5, at_most=True),
    ]
    return list(measured.values()), bars


def flatness(folder: Path) -> tuple[list[Measurement], list[Bar]]:
    """Push many times, and compare the last ten pushes with the first ten."""
    pusher = Pusher(folder / "flat", "shm", 1, make_weights(sized(64, 1) * 2**20))
    try:
        pusher.push()
        pusher.push()
        seconds = [pusher.push() for _ in range(FLAT_PUSHES)]
    finally:
        pusher.stop()
    first, last = np.median(seconds[:10]), np.median(seconds[-10:])
    measured = Measurement("64 MB pushes by shm, one after the other", "pushes/s", [1 / second for second in seconds])
    return [measured], [Bar("seconds of pushes 21 to 30 / 1 to 10", float(last / first), 1.2, at_most=True)]


def pause(folder: Path) -> tuple[list[Measurement], list[Bar]]:
    """How long vLLM pauses while it generates, against how long its own load takes."""
    pauses, loads = asyncio.run(measure_pause(folder / "pause"))
    return [pauses, loads], [Bar("vLLM, 200 MB: pause / load", median_ratio(loads, pauses), 1.5, at_most=True)]


def main() -> int:
    make_parser().parse_args()
    measurements: list[Measurement] = []
    bars: list[Bar] = []
    torch.set_num_threads(LearnerConfig().threads_per_rank)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        if SMOKE:
            report_skipped("the pause of vLLM", "it takes long to start; the torch engine is in its place")
        for part in (pause, transfers, flatness):
            measured, judged = part(Path(name))
            measurements += measured
            bars += judged
    ok = report("weights", "the weight push, one machine, CPU", measurements, bars)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
