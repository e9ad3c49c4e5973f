"""Measures pushes by cuda_ipc from a publisher's process to an engine that decodes on the same GPU."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness import Child, Results, say, sized
from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig
from penstock.trajectory import Sampling
from penstock.weights.transports import Deadline

HOST = "127.0.0.1"
RUN = "bench"
NUM_REQUESTS = sized(64, 2)
NUM_PUSHES = sized(4, 2)
MAX_MODEL_LEN = sized(4096, 512)
START_TIMEOUT_S = 180.0
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
GPU_MEMORY = {"tiny": 0.1, "0.5b": 0.3, "7b": 0.5}


def make_model(shape: str, seed: int) -> Any:
    """A random Qwen2 in bfloat16, created on its device. Biases and norms are random too, because each must be
    loaded."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SHAPES[shape], max_position_embeddings=MAX_MODEL_LEN, initializer_range=0.04, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


class ModelWriter:
    def write(self, shape: str, folder: str) -> float:
        started = time.monotonic()
        make_model(shape, seed=1).save_pretrained(folder)
        return time.monotonic() - started


class Publisher:
    """The learner's side: one model on the GPU, whose weights are pushed version after version."""

    def __init__(self, shape: str, folder: str) -> None:
        import torch

        from penstock_learner.weights.publisher import WeightPublisher

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
        self._model = make_model(shape, seed=2)
        self._publisher = WeightPublisher(make_config(Path(folder)), HOST, self._device)

    def stage(self, version: int) -> float:
        """Change the weights a little and stage them. Returns the seconds it took."""
        import torch

        started = time.monotonic()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.01)
        weights = list(self._model.named_parameters())
        staged = self._publisher.begin(version, 1, [(name, tuple(weight.shape)) for name, weight in weights])
        for name, weight in weights:
            staged.put(name, weight.detach())
        staged.checksums(Deadline(START_TIMEOUT_S, "hashing"))
        return time.monotonic() - started

    def push(self, version: int, target: dict[str, Any]) -> dict[str, Any]:
        from penstock_learner.weights.senders import PushTarget

        started = time.monotonic()
        report = self._publisher.push(version, [PushTarget(**target)])
        return {
            "total": time.monotonic() - started,
            "transport": report.transport,
            "seconds": report.seconds,
            "failed": report.failed,
            "digest": report.weights_digest,
            "num_bytes": report.num_bytes,
            "running_requests": report.running_requests,
        }

    def log_probs(self, samples: list[tuple[list[int], list[int]]]) -> tuple[list[float], list[float]]:
        """Log-probs of every answer under the newest weights: in bfloat16, as the engine computes them, and in float32.
        This must be the last call, because the model stays in float32."""
        in_bf16 = [value for prompt, answer in samples for value in self._forward(prompt, answer)]
        self._model.float()
        return in_bf16, [value for prompt, answer in samples for value in self._forward(prompt, answer)]

    def _forward(self, prompt: list[int], answer: list[int]) -> list[float]:
        import torch

        ids = torch.tensor([prompt + answer], device=self._device)
        with torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1].float()
            log_probs: list[float] = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return log_probs


def make_config(folder: Path) -> RunConfig:
    from penstock.config.loading import validate

    return validate(
        {"run": RUN, "run_dir": str(folder.parent), "model": {"path": str(folder), "dtype": "bfloat16"}}, "bench"
    )


@asynccontextmanager
async def member(config: RunConfig, engine: Any) -> AsyncIterator[dict[str, Any]]:
    """Start the rollout server's weight listener in front of the engine. Yields the fields of the push target."""
    from prometheus_client import CollectorRegistry

    from penstock.internal_calls import ClusterKey
    from penstock.v1 import weights_pb2_grpc
    from penstock.weights.transports import host_id
    from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener
    from penstock_rollout.metrics import RolloutMetrics

    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)
    metrics = RolloutMetrics(CollectorRegistry())
    servicer = WeightMember(RUN, engine, metrics, read_term=lambda: asyncio.sleep(0, result=1))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(servicer, listener)
    port = listener.add_insecure_port(f"{HOST}:0")
    await listener.start()
    try:
        yield {
            "server_id": "member",
            "address": f"{HOST}:{port}",
            "devices": engine.devices,
            "host_id": host_id(),
            "transports": available_transports(engine.devices),
        }
    finally:
        await listener.stop(None)


class Load:
    """Requests that decode all the time, and the gaps between their tokens."""

    def __init__(self, engine: Any, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._numbers = iter(range(10**9))
        self._tasks: list[asyncio.Task[None]] = []
        self.gaps: list[tuple[float, float]] = []
        """When each gap ended, and how long it was."""

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._decode(index)) for index in range(NUM_REQUESTS)]

    async def _decode(self, seed: int) -> None:
        while True:
            await self.generate(seed, MAX_MODEL_LEN // 2)

    async def generate(self, seed: int, max_tokens: int) -> tuple[list[int], list[int], list[float], set[int]]:
        """Generate once. Returns the prompt, the answer, its log-probs, and the versions that made it."""
        from penstock_rollout.engines.engine import GenerateRequest

        prompt = random.Random(seed).choices(range(2, self._vocab_size), k=32)
        sampling = Sampling(max_tokens=max_tokens, seed=seed)
        request = GenerateRequest(f"request-{next(self._numbers)}", tuple(prompt), sampling, stream=True)
        answer: list[int] = []
        log_probs: list[float] = []
        versions: set[int] = set()
        last = None
        async for chunk in self._engine.generate(request):
            now = time.monotonic()
            if last is not None:
                self.gaps.append((now, now - last))
            last = now
            answer += chunk.token_ids
            log_probs += chunk.log_probs
            versions |= {segment.policy_version for segment in chunk.segments}
        return prompt, answer, log_probs, versions

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def bench_engine(name: str, shape: str, graphs: bool, extra: dict[str, Any]) -> Results:
    results = Results()
    config = EngineConfig.model_validate(
        {"name": name, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": NUM_REQUESTS, "enforce_eager": not graphs,
         "gpu_memory_utilization": GPU_MEMORY[shape], "extra": extra}
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        asyncio.run(_bench(results, shape, Path(folder) / "model", config))
    return results


async def _bench(results: Results, shape: str, folder: Path, config: EngineConfig) -> None:
    from penstock_rollout.engines.factory import create_engine

    writer = Child(ModelWriter)
    say(f"{shape}: the model was made and written in {writer.call('write', shape, str(folder)):.1f} s")
    writer.stop()
    engine = create_engine(config, folder, "bfloat16", seed=0)
    async with asyncio.timeout(START_TIMEOUT_S):
        await engine.start(policy_version=0)
    say(f"{shape}: the engine is ready on {engine.devices}")
    publisher = Child(Publisher, shape, str(folder))
    load = Load(engine, SHAPES[shape]["vocab_size"])
    try:
        async with member(make_config(folder), engine) as target:
            load.start()
            await _push_in_flight(results, shape, publisher, target, load)
            await load.stop()
            await _compare_log_probs(results, shape, publisher, load)
    finally:
        await load.stop()
        publisher.stop()
        await engine.stop()


async def _push_in_flight(results: Results, shape: str, publisher: Child, target: dict[str, Any], load: Load) -> None:
    pushes: list[dict[str, Any]] = []
    stagings, longest = [], []
    for version in range(1, NUM_PUSHES + 1):
        stagings.append(await asyncio.to_thread(publisher.call, "stage", version))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        push = await asyncio.to_thread(publisher.call, "push", version, target)
        assert not push["failed"], push["failed"]
        await asyncio.sleep(0.5)
        longest.append(max((gap for ended, gap in load.gaps if ended > started), default=0.0))
        say(f"{shape}: version {version} by {push['transport']}, digest {push['digest']}, {push['seconds']}")
        pushes.append(push)
    warm = pushes[1:]
    phases = {phase: [push["seconds"][phase] for push in warm] for phase in ("receive", "load", "pause")}
    gigabytes = warm[0]["num_bytes"] / 1e9
    results.add("weights", "GB", gigabytes)
    results.add("first push", "ms", 1e3 * pushes[0]["total"])
    results.add("push", "ms", *(1e3 * push["total"] for push in warm))
    results.add("push", "GB/s", *(gigabytes / push["total"] for push in warm))
    results.add("staging at the publisher", "ms", *(1e3 * seconds for seconds in stagings[1:]))
    for phase, seconds in phases.items():
        results.add(phase, "ms", *(1e3 * s for s in seconds))
    results.add("usual gap between tokens", "ms", 1e3 * statistics.median(gap for _, gap in load.gaps))
    results.add("longest gap between tokens", "ms", *(1e3 * gap for gap in longest[1:]))
    results.add("requests in flight", "requests", *(push["running_requests"] for push in warm))
    results.bar("pushed by cuda_ipc", float(all(p["transport"] == "cuda_ipc" for p in pushes)), 1)
    ratio = statistics.median(p / s for p, s in zip(phases["pause"], phases["load"], strict=True))
    results.bar("pause / the engine's own load", ratio, 1.5, at_most=True)
    results.bar("requests in flight", min(push["running_requests"] for push in warm), NUM_REQUESTS)


async def _compare_log_probs(results: Results, shape: str, publisher: Child, load: Load) -> None:
    """Compare new requests with a Hugging Face forward pass of the weights that were pushed last."""
    answers = await asyncio.gather(*(load.generate(seed, sized(64, 4)) for seed in range(sized(8, 1))))
    samples = [(prompt, answer) for prompt, answer, _, _ in answers]
    bf16, exact = await asyncio.to_thread(publisher.call, "log_probs", samples)
    found = [value for _, _, log_probs, _ in answers for value in log_probs]
    ours = [abs(a - b) for a, b in zip(found, exact, strict=True)]
    theirs = [abs(a - b) for a, b in zip(bf16, exact, strict=True)]
    stamped = all(versions == {NUM_PUSHES} for _, _, _, versions in answers)
    results.add("log-probs after the push, mean difference to float32", "nats", statistics.mean(ours))
    results.add("log-probs of transformers in bfloat16, mean difference to float32", "nats", statistics.mean(theirs))
    results.bar(
        "log-prob difference / transformers in bfloat16", statistics.mean(ours) / statistics.mean(theirs), 2, True
    )
    results.bar("tokens are stamped with the last version", float(stamped), 1)
