"""Compares the tokens per second of a rollout server with those of the bare vLLM engine, with the same requests.

    make bench-rollout

The server's path is the real one: leases from a private Redis, the agent loop, rewards, encoding, appending. There are
two sizes. In `small` (5 M parameters) the engine computes for most of a step, as in any real training, and the bar is
on this size. `tiny` (0.4 M) is for information. There a step is mostly Python on both sides, so the work that the
server does beside the engine has a large effect, and so has every other process on the machine. Rounds alternate; a
ratio is the median of their ratios.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import Bar, Measurement, ends_without, report
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock_rollout.engines.factory import start_engine
from replay import Server
from rollout_parts.model import ModelShape, make_model
from rollout_parts.paths import REPLAY, Contenders, Load, Paths, engine_config

SHAPES = {
    "tiny": ModelShape(
        vocab_size=2048, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1
    ),
    "small": ModelShape(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2
    ),
}
LOADS = {
    "tiny": Load(8, prompt_tokens=32, mean_tokens=64, concurrency=64, groups_at_once=32, window_tokens=8_000),
    "small": Load(8, prompt_tokens=32, mean_tokens=64, concurrency=64, groups_at_once=32, window_tokens=6_000),
}
NUM_ROUNDS = 15
"""Many short rounds of a few seconds each, so that other processes affect both contenders of a round alike."""
START_TIMEOUT_S = 150.0
GOALS = {"small": 0.95}


async def measure(size: str, folder: Path, server: Server) -> Contenders:
    from penstock_rollout.engines.vllm.engine import VllmEngine

    load, shape = LOADS[size], SHAPES[size]
    make_model(folder, shape, load.mean_tokens)
    engine = VllmEngine(engine_config(load, kv_cache_bytes=256 * 2**20), folder, "float32", 0)
    client = connect(RedisConfig(url=server.url))
    await start_engine(engine, START_TIMEOUT_S)
    try:
        async with Paths(engine, RedisReplayQueue(client, size, REPLAY), folder, load, shape.vocab_size) as paths:
            return await paths.rounds(NUM_ROUNDS, lambda line: print(f"{size}: {line}", flush=True), math.inf)
    finally:
        await engine.stop()
        await client.aclose()


def main() -> int:
    sizes = sys.argv[1:] or list(SHAPES)
    ends_without("vLLM")
    measurements: list[Measurement] = []
    bars = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        server = Server(Path(name) / "redis")
        try:
            for size in sizes:
                measured = asyncio.run(measure(size, Path(name) / size, server))
                measurements += [replace(m, name=f"{size}: {m.name}") for m in measured.measurements]
                if size in GOALS:
                    bars.append(Bar(f"{size}: rollout server / AsyncLLM.generate", measured.ratio, GOALS[size]))
                else:
                    measurements.append(Measurement(f"{size}: ratio, no bar", "", [measured.ratio]))
        finally:
            server.stop()
    ok = report("rollout", "generation, 64 requests decoded at once", measurements, bars)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
