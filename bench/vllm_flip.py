"""Compares two ways to flip vLLM to a new version while it decodes: by one call to EngineCore, and by a call per stage.

    .venv/bin/python bench/vllm_flip.py [--requests 128] [--rounds 20]

One engine generates without a break. Versions are staged, and committed in one way and the other in turn. What counts
is how long decoding stops, by the clock of EngineCore: the time from the last step of the old version to the first of
the new one, less a usual step. The load itself is the same both ways; the bar leaves it out. A few requests stream
every token, so that each step is seen; the others get 16 at once, as the groups of a run do. All prompts are different,
so no KV is shared, and it does not matter that the scheduler hears of every other load only. It needs vLLM 0.32.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from harness import Bar, Measurement, report
from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2
from penstock.weights.checksums import host_checksum
from penstock.weights.folder_tensors import safetensors_of
from penstock.weights.manifest import TensorShape, allocate_buckets, build_manifest
from penstock.weights.snapshot import write_snapshot
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.vllm.engine import VllmEngine
from rollout_parts.model import ModelShape, make_model

SHAPE = ModelShape(512, 128, 256, 2, 4, 2)
NUM_STREAMED = 4
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 256
AROUND_S = 0.4
"""Generation that is watched before and after a flip, to know a usual step."""
WAYS = {True: "one call", False: "a call per stage"}
STOPS, BESIDE_LOAD = "decoding stops", "decoding stops, without the load"
WHAT = (STOPS, BESIDE_LOAD, "load", "reported pause")
GOAL = 0.6


class Steps:
    """When EngineCore ended each step that made tokens, by its own clock, and with which version."""

    def __init__(self, engine: VllmEngine) -> None:
        self._ends: list[tuple[float, str]] = []
        queue = engine.llm.engine_core.outputs_queue
        self._put: Callable[[Any], None] = queue.put_nowait
        queue.put_nowait = self._record

    def _record(self, arrived: Any) -> None:
        if not isinstance(arrived, Exception) and any(output.new_token_ids for output in arrived.outputs):
            self._ends.append((arrived.timestamp, arrived.weight_version))
        self._put(arrived)

    def clear(self) -> None:
        self._ends.clear()

    def stop_s(self) -> float:
        """The time from the last step of the old version to the first of the new one, less a usual step."""
        lengths = [(after[0] - before[0], after[1] != before[1]) for before, after in pairwise(self._ends)]
        (flip,) = (length for length, is_flip in lengths if is_flip)
        return flip - statistics.median(length for length, _ in lengths)


def stage(folder: Path, model: Path, version: int) -> tuple[weights_pb2.AnnounceRequest, list[str]]:
    """Write the model's own weights as a snapshot of the version. Returns its announcement and checksums."""
    weights = {name: array for path in safetensors_of(model) for name, array in load_file(path).items()}
    shapes = [TensorShape(name, "F32", array.shape) for name, array in weights.items()]
    manifest = build_manifest("bench", version, 1, shapes, bucket_bytes=64 << 20)
    buckets = allocate_buckets(manifest)
    for spec in manifest.tensors:
        raw = weights[spec.name].reshape(-1).view(np.uint8)
        buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes] = raw
    checksums = [host_checksum(manifest.checksum, bucket) for bucket in buckets]
    write_snapshot(folder, manifest, buckets, checksums)
    announcement = weights_pb2.AnnounceRequest(
        manifest=manifest, transport="snapshot", rendezvous=str(folder), rank=0, world_size=1, deadline_s=60.0
    )
    return announcement, checksums


async def measure(folder: Path, num_requests: int, num_rounds: int) -> dict[bool, dict[str, Measurement]]:
    """What was measured of flips, by whether they were one call."""
    model = make_model(folder / "model", SHAPE, 100)
    config = EngineConfig(name="vllm", max_model_len=512, max_num_seqs=num_requests, kv_cache_bytes=512 * 2**20)
    engine = VllmEngine(config, model, "float32", 0)
    await engine.start(policy_version=0)
    found = {way: {what: Measurement(f"{name}: {what}", "ms") for what in WHAT} for way, name in WAYS.items()}
    generating = [asyncio.create_task(_generate(engine, index)) for index in range(num_requests)]
    steps = Steps(engine)
    try:
        for round_index in range(num_rounds + 1):
            for way in sorted(WAYS, reverse=bool(round_index % 2)):
                version = engine.policy_version + 1
                announcement, checksums = stage(folder / str(version), model, version)
                engine._flips_in_one_call = way
                await engine.stage_weights(announcement)
                await asyncio.sleep(AROUND_S)  # received meanwhile
                steps.clear()
                await asyncio.sleep(AROUND_S)
                done = await engine.commit_weights(version, checksums, timeout_s=60)
                await asyncio.sleep(AROUND_S)
                stop_s = steps.stop_s()
                if round_index > 0:
                    figures = (stop_s, stop_s - done.load_s, done.load_s, done.paused_s)
                    for measurement, seconds in zip(found[way].values(), figures, strict=True):
                        measurement.rates.append(1000 * seconds)
    finally:
        for task in generating:
            task.cancel()
        await asyncio.gather(*generating, return_exceptions=True)
        await engine.stop()
    return found


async def _generate(engine: VllmEngine, index: int) -> None:
    """Send requests one after the other, for ever."""
    numbers = random.Random(index)
    sampling = Sampling(max_tokens=RESPONSE_TOKENS, ignore_eos=True)
    while True:
        prompt = tuple(numbers.randrange(2, SHAPE.vocab_size) for _ in range(PROMPT_TOKENS))
        request = GenerateRequest(f"{index}.{numbers.random()}", prompt, sampling, stream=index < NUM_STREAMED)
        async for _ in engine.generate(request):
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=128, help="requests at once")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        found = asyncio.run(measure(Path(name), arguments.requests, arguments.rounds))
    one, several = found[True], found[False]
    ratio = one[BESIDE_LOAD].median / several[BESIDE_LOAD].median
    bars = [Bar(f"{BESIDE_LOAD}: one call / a call per stage", ratio, GOAL, at_most=True)]
    measurements = [*one.values(), *several.values()]
    return 0 if report("vllm_flip", "the flip of a version in vLLM, CPU", measurements, bars) else 1


if __name__ == "__main__":
    sys.exit(main())
