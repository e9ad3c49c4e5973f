"""Compares the tokens per second of the SGLang engine with those of bare SGLang, on a GPU.

    PYTHONPATH=.:rollout_server:bench python bench/gpu/sglang_speed.py --extra '{"attention_backend": "triton"}'

It needs a GPU, torch, transformers and SGLang, but neither Redis nor Ray. Three servers share the GPU and take turns:

| contender | flags                                                                                              |
|-----------|----------------------------------------------------------------------------------------------------|
| bare      | SGLang's defaults, called by HTTP with the same requests                                           |
| engine    | `keep_kv_cache: false`, so that the overlap scheduler is on, and without deterministic inference   |
| default   | the engine's defaults: the KV cache is kept, without overlap, and seeds are honoured               |

All use CUDA graphs and report log-probs. `--extra` are flags of all three. The model is random, with the shape of
Qwen2-0.5B, in bfloat16. A start takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from harness import Child, Results, ends_without, run_parts, save, say
from penstock.config.rollout import EngineConfig
from penstock.machine import free_port
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.sglang.engine import SglangEngine
from weights_gpu_parts.engine import SHAPES, ModelWriter

NAME = "sglang_gpu"
SHAPE = "0.5b"
TIMEOUT_S = 560.0
START_TIMEOUT_S = 150.0
READY_POLL_S = 0.5
NUM_REQUESTS = 256
NUM_TOKENS = 256
PROMPT_TOKENS = 128
NUM_ROUNDS = 3
GOAL = 0.95
MAX_MODEL_LEN = 2048
COMMON: dict[str, Any] = {"max_total_tokens": 300_000, "grammar_backend": "none"}
MEMORY = 0.25

Round = Callable[[], Awaitable[int]]


def prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(2, SHAPES[SHAPE]["vocab_size"]), k=PROMPT_TOKENS) for _ in range(NUM_REQUESTS)]


class Bare:
    """SGLang's own server. Requests are those of any client that needs tokens and log-probs at the end."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self._process = process
        self._client = client
        self._seeds = iter(range(10**9))

    @classmethod
    async def start(cls, folder: Path, extra: dict[str, Any]) -> Bare:
        port = free_port("127.0.0.1")
        flags = COMMON | extra | {
            "model_path": folder, "port": port, "context_length": MAX_MODEL_LEN, "max_running_requests": NUM_REQUESTS,
            "mem_fraction_static": MEMORY, "dtype": "bfloat16", "log_level": "warning",
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang.launch_server", "--skip-tokenizer-init", *words
        )
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )  # fmt: skip
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await _is_ready(client):
                assert process.returncode is None, "SGLang ended while it started"
                await asyncio.sleep(READY_POLL_S)
        return cls(process, client)

    async def round(self) -> int:
        return sum(await asyncio.gather(*(self._ask(prompt) for prompt in prompts(next(self._seeds)))))

    async def _ask(self, prompt: list[int]) -> int:
        params = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        answer = (await self._client.post("/generate", json=body)).json()
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        return len(answer["output_ids"])

    async def stop(self) -> None:
        await self._client.aclose()
        self._process.terminate()
        await self._process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health_generate")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


class Engine:
    """The engine of a rollout server."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        self._numbers = iter(range(10**9))
        self._seeds = iter(range(10**9))

    @classmethod
    async def start(cls, folder: Path, extra: dict[str, Any], *, keep_kv_cache: bool) -> Engine:
        config = EngineConfig(
            name="sglang", max_model_len=MAX_MODEL_LEN, max_num_seqs=NUM_REQUESTS, gpu_memory_utilization=MEMORY,
            keep_kv_cache=keep_kv_cache, extra=COMMON | extra,
        )  # fmt: skip
        engine = SglangEngine(config, folder, "bfloat16", seed=0)
        async with asyncio.timeout(START_TIMEOUT_S):
            await engine.start(policy_version=0)
        say(f"its workers are on {engine.devices}")
        return cls(engine)

    async def round(self) -> int:
        return sum(await asyncio.gather(*(self._ask(prompt) for prompt in prompts(next(self._seeds)))))

    async def _ask(self, prompt: list[int]) -> int:
        request = GenerateRequest(f"r{next(self._numbers)}", tuple(prompt), Sampling(max_tokens=NUM_TOKENS))
        return sum([len(chunk.token_ids) async for chunk in self._engine.generate(request)])

    async def stop(self) -> None:
        await self._engine.stop()


async def bench(results: Results, folder: Path, extra: dict[str, Any]) -> None:
    starts: dict[str, Callable[[], Awaitable[Bare | Engine]]] = {
        "bare": lambda: Bare.start(folder, extra),
        "engine": lambda: Engine.start(
            folder, extra | {"enable_deterministic_inference": False}, keep_kv_cache=False
        ),
        "default": lambda: Engine.start(folder, extra, keep_kv_cache=True),
    }  # fmt: skip
    servers: dict[str, Bare | Engine] = {}
    rates: dict[str, list[float]] = {name: [] for name in starts}
    try:
        for name, start in starts.items():
            started = time.monotonic()
            servers[name] = await start()
            say(f"{name} is ready after {time.monotonic() - started:.0f} s")
            await servers[name].round()  # warms up
        for _ in range(NUM_ROUNDS):
            for name, server in servers.items():
                started = time.monotonic()
                num_tokens = await server.round()
                rates[name].append(num_tokens / (time.monotonic() - started))
                say(f"{name}: {rates[name][-1]:,.0f} tokens/s")
        for name, measured in rates.items():
            results.add(name, "tokens/s", *measured)
        for name, goal in (("engine", GOAL), ("default", 0.0)):
            ratio = statistics.median(a / b for a, b in zip(rates[name], rates["bare"], strict=True))
            if goal:
                results.bar(f"{name} / bare SGLang", ratio, goal)
            else:
                results.add(f"{name} / bare SGLang", "", ratio)
        save(results)
    finally:
        for server in servers.values():
            await server.stop()


def run(extra: dict[str, Any]) -> Results:
    results = Results()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "model"
        writer = Child(ModelWriter)
        writer.call("write", SHAPE, str(folder))
        writer.stop()
        asyncio.run(bench(results, folder, extra))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", default="{}", help="additional flags of SGLang, as JSON")
    extra = json.loads(parser.parse_args().extra)
    ends_without("SGLang")
    is_met = run_parts(NAME, "SGLang on one GPU", ["speed"], {"speed": TIMEOUT_S}, lambda _: run(extra))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
