"""Compares the tokens per second of a rollout server with those of bare vLLM, on a GPU with 512 requests at once.

    PYTHONPATH=.:rollout_server:bench python bench/gpu/rollout_gpu.py

It needs a GPU, torch, transformers and vLLM, but neither Redis nor Ray: the groups go into the queue in memory. The
model is random, with the shape of Qwen2-0.5B, in bfloat16. vLLM takes two minutes to start, and a round takes half a
minute. `--cpu` uses a small model and few requests, to try the script without a GPU. `--concurrency 512` sets the
number of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Bar, ends_without, report
from penstock_rollout.engines.factory import start_engine
from rollout_parts.model import ModelShape, make_model
from rollout_parts.paths import Contenders, Load, Paths, engine_config, memory_queue

STARTED = time.monotonic()
DEADLINE_S = 420.0
ROUNDS_UNTIL_S = 330.0
MAX_ROUNDS = 5
START_TIMEOUT_S = 150.0
GOAL = 0.97
SHAPE = ModelShape(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2,
    dtype="bfloat16",
)  # fmt: skip
LOAD = Load(8, prompt_tokens=128, mean_tokens=256, concurrency=512, groups_at_once=160, window_tokens=100_000)
CPU_SHAPE = ModelShape(
    vocab_size=2048, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1, dtype="bfloat16"
)
CPU_LOAD = Load(8, prompt_tokens=32, mean_tokens=64, concurrency=64, groups_at_once=20, window_tokens=4_000)
CPU_KV_CACHE_BYTES = 2**30


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


async def measure(folder: Path, shape: ModelShape, load: Load, conclude: Callable[[Contenders], bool]) -> bool:
    """Measure the rounds, and return the result of `conclude`, which is called before vLLM is stopped."""
    from penstock_rollout.engines.vllm.engine import VllmEngine

    say("making the model")
    make_model(folder, shape, load.mean_tokens)
    memory = {"gpu_memory_utilization": 0.6, "kv_cache_bytes": CPU_KV_CACHE_BYTES}
    engine = VllmEngine(engine_config(load, **memory), folder, shape.dtype, 0)
    say("starting vLLM")
    await start_engine(engine, START_TIMEOUT_S)
    say("vLLM is ready")
    try:
        async with Paths(engine, memory_queue(), folder, load, shape.vocab_size) as paths:
            return conclude(await paths.rounds(MAX_ROUNDS, say, STARTED + ROUNDS_UNTIL_S))
    finally:
        await engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="use a small model and few requests; writes no results")
    parser.add_argument("--concurrency", type=int, help="requests decoded at once")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    shape, load = (CPU_SHAPE, CPU_LOAD) if arguments.cpu else (SHAPE, LOAD)
    load = load.at(arguments.concurrency or load.concurrency)

    ends_without("vLLM")

    def conclude(measured: Contenders) -> bool:
        bars = [Bar("rollout server / AsyncLLM.generate", measured.ratio, GOAL)]
        num_rounds = len(measured.bare.rates.rates)
        if arguments.cpu:
            say(f"ratio {bars[0].value:.3f} over {num_rounds} rounds")
            return True
        title = f"generation, Qwen2-0.5B shape, {load.concurrency} requests decoded at once, {num_rounds} rounds"
        return report("rollout_gpu", title, measured.measurements, bars)

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        is_met = asyncio.run(asyncio.wait_for(measure(Path(name), shape, load, conclude), DEADLINE_S - 10))
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
