"""Compares the tokens per second of a rollout server with those of the bare vLLM engine, with the same requests.

    make bench-rollout
    PYTHONPATH=.:rollout_server:bench python bench/rollout.py gpu

The server's path is the real one: leases, the agent loop, rewards, encoding, appending. Rounds alternate; a ratio is
the median of their ratios. Models are random. `small` (5 M parameters) uses a private Redis; its engine computes for
most of a step, as in any real training. `gpu` has the shape of Qwen2-0.5B and the queue in memory, and needs only a
GPU, torch, transformers and vLLM, which takes two minutes to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib.util
import math
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import SMOKE, Bar, Measurement, make_parser, redis_process, report, report_skipped, say, sized
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock_rollout.engines.factory import start_engine
from rollout_parts.paths import REPLAY, Load, ModelShape, Paths, engine_config, make_model, memory_queue

START_TIMEOUT_S = 150.0
DEADLINE_S = 420.0
"""When the program ends on a GPU, which is rented by time."""


@dataclass(frozen=True)
class Size:
    shape: ModelShape
    load: Load
    goal: float
    num_rounds: int = 15
    """Many short rounds of a few seconds each, so that other processes affect both contenders of a round alike."""
    engine: tuple[tuple[str, Any], ...] = (("kv_cache_bytes", 256 * 2**20),)


SIZES = {
    "small": Size(
        ModelShape(vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2),
        Load(8, prompt_tokens=32, mean_tokens=64, concurrency=64, groups_at_once=32, window_tokens=6_000),
        goal=0.95,
    ),
    "smoke": Size(
        ModelShape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1),
        Load(2, prompt_tokens=8, mean_tokens=8, concurrency=8, groups_at_once=8, window_tokens=100),
        goal=0.0, num_rounds=1,
    ),
    "gpu": Size(
        ModelShape(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2,
            dtype="bfloat16",
        ),
        Load(8, prompt_tokens=128, mean_tokens=256, concurrency=512, groups_at_once=160, window_tokens=100_000),
        num_rounds=5, goal=0.97, engine=(("gpu_memory_utilization", 0.6),),
    ),
}  # fmt: skip


@contextlib.asynccontextmanager
async def queue_of(name: str, folder: Path) -> AsyncIterator[Any]:
    if name == "gpu":
        yield memory_queue()
        return
    with redis_process(folder) as (_, url):
        client = connect(RedisConfig(url=url))
        yield RedisReplayQueue(client, name, REPLAY)
        await client.aclose()


async def measure(name: str, size: Size, folder: Path) -> tuple[list[Measurement], list[Bar]]:
    from penstock_rollout.engines.vllm.engine import VllmEngine

    make_model(folder / "model", size.shape, size.load.mean_tokens)
    engine = VllmEngine(engine_config(size.load, **dict(size.engine)), folder / "model", size.shape.dtype, 0)
    say(f"{name}: starting vLLM")
    await start_engine(engine, START_TIMEOUT_S)
    until = time.monotonic() + DEADLINE_S / 2 if name == "gpu" else math.inf
    try:
        async with (
            queue_of(name, folder / "redis") as queue,
            Paths(engine, queue, folder / "model", size.load, size.shape.vocab_size) as paths,
        ):
            measured = await paths.rounds(size.num_rounds, lambda line: say(f"{name}: {line}"), until)
    finally:
        await engine.stop()
    found = [replace(m, name=f"{name}: {m.name}") for m in measured.measurements]
    return found, [Bar(f"{name}: rollout server / AsyncLLM.generate", measured.ratio, size.goal)]


def main() -> int:
    parser = make_parser()
    parser.add_argument("size", nargs="?", default=sized("small", "smoke"), choices=SIZES)
    name = parser.parse_args().size
    if SMOKE and importlib.util.find_spec("vllm") is None:
        report_skipped("generation", "vLLM is not installed")
        return 0
    if name == "gpu":
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        measurements, bars = asyncio.run(measure(name, SIZES[name], Path(folder)))
    return 0 if report("rollout_gpu" if name == "gpu" else "rollout", "generation", measurements, bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
