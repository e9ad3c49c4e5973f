"""Tokens a second through a rollout server against the bare vLLM engine, driven directly with the same requests.

make bench-rollout

The server's path is the real one: leases from a private Redis, the agent loop, rewards, encoding, appending. Two sizes:
`tiny` (0.4 M parameters) makes the Python around the engine weigh as much as it can; in `small` (5 M) the engine
computes for most of a step, as it does wherever anybody trains. Rounds alternate; a bar is the median of their ratios.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import Bar, Measurement, median_ratio, report
from penstock.config.service import RedisConfig
from penstock.redis_client import connect
from penstock.replay.redis_queue import RedisReplayQueue
from replay import Server
from rollout_model import ModelShape, make_model
from rollout_paths import REPLAY, Load, Paths, engine_config

SHAPES = {
    "tiny": ModelShape(
        vocab_size=2048, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1
    ),
    "small": ModelShape(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2
    ),
}
LOADS = {
    "tiny": Load(96, 8, prompt_tokens=32, max_tokens=128, concurrency=64, groups_at_once=64),
    "small": Load(48, 8, prompt_tokens=32, max_tokens=128, concurrency=64, groups_at_once=32),
}
MEAN_TOKENS = 64
NUM_ROUNDS = 10
GOAL = 0.95


async def measure(size: str, folder: Path, server: Server) -> tuple[list[Measurement], Bar]:
    from penstock_rollout.engines.vllm_engine import VllmEngine

    load, shape = LOADS[size], SHAPES[size]
    make_model(folder, shape, MEAN_TOKENS)
    engine = VllmEngine(engine_config(load, kv_cache_bytes=256 * 2**20), folder, "float32", 0)
    client = connect(RedisConfig(url=server.url))
    await engine.start(policy_version=0)
    try:
        async with Paths(engine, RedisReplayQueue(client, size, REPLAY), folder, load, shape.vocab_size) as paths:
            bare, served = await paths.rounds(NUM_ROUNDS, lambda line: print(f"{size}: {line}", flush=True), math.inf)
    finally:
        await engine.stop()
        await client.aclose()
    bar = Bar(f"{size}: {served.name} / {bare.name}", median_ratio(served, bare), GOAL)
    return [replace(m, name=f"{size}: {m.name}") for m in (bare, served)], bar


def main() -> int:
    sizes = sys.argv[1:] or list(SHAPES)
    measurements, bars = [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        server = Server(Path(name) / "redis")
        try:
            for size in sizes:
                measured, bar = asyncio.run(measure(size, Path(name) / size, server))
                measurements += measured
                bars.append(bar)
        finally:
            server.stop()
    ok = report("rollout", "generation, 64 requests decoded at once", measurements, bars)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
