"""Measures what it gains that a group uses rows of two servers (`rollout.spread_groups`).

    make bench-spread                                about 6 minutes on two idle cores
    python bench/spread.py --rounds 2 --tokens 48    the same, less exact; results are not written

Two runs have two servers each, with the torch engine and 32 rows; one run spreads its groups, and the other does not.
In alternating rounds, each makes one group of 64 samples, which has more samples than a server has rows, and four
groups of 32, which fit. What is compared is the CPU time of the busier server: it is the time that the groups would
take if each server had a machine of its own, and does not depend on what else runs on this one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from harness import Bar, Measurement, median_ratio, report
from penstock.codec import decode_group, encode_prompt
from penstock.config.loading import dump_config, validate
from penstock.config.service import RedisConfig
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet
from penstock.store.redis_client import connect
from penstock.trajectory import Prompt, Sampling
from replay import Server
from rollout_parts.model import ModelShape, make_model

SHAPE = ModelShape(
    vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2,
    max_positions=1024,
)  # fmt: skip
ROWS, NUM_SERVERS = 32, 2
NUM_TOKENS, NUM_ROUNDS = 192, 6
CASES = {"one group of 64": (1, 64), "four groups of 32": (4, 32)}
"""Number of groups, and samples of each."""
MOST = {"one group of 64": 0.7, "four groups of 32": 1.1}
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
READY_S, GROUPS_S = 600.0, 600.0
SETTLE_S = 1.5
"""Between two rounds: the servers report that they are idle."""


class Pair:
    """Two servers of one run, as processes."""

    def __init__(self, name: str, folder: Path, redis_url: str, *, spread: bool) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        reward = self.folder / "reward.py"
        reward.write_text(REWARD)
        engine = {"name": "torch", "max_model_len": SHAPE.max_positions, "max_num_seqs": ROWS}
        self.config = validate(
            {
                "run": name,
                "run_dir": str(self.folder),
                "model": {"path": str(folder / "model")},
                "redis": {"url": redis_url},
                "replay": {"groups_per_step": 10**6, "max_staleness": 10**6},
                "rollout": {
                    "spread_groups": spread, "engine": engine, "reward": {"function_file": str(reward)},
                    "adaptive_concurrency": {"enabled": False}, "max_concurrent_groups": 2,
                },
            },
            "bench",
        )  # fmt: skip
        self.client: Any = connect(RedisConfig(url=redis_url))
        self.queue = RedisReplayQueue(self.client, name, self.config.replay)
        self.fleet = Fleet(self.client, name)
        self.servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        path = self.folder / "run.yaml"
        path.write_text(dump_config(self.config))
        for number in range(NUM_SERVERS):
            command = [sys.executable, "-m", "penstock_rollout", "--config", str(path), "--server-id", f"s{number}"]
            with (self.folder / f"s{number}.log").open("wb") as log:
                self.servers.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
                    )
                )

    async def ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while [server.state for server in await self.fleet.servers()] != ["READY"] * NUM_SERVERS:
                if any(server.poll() is not None for server in self.servers):
                    raise SystemExit((self.folder / "s0.log").read_text()[-2000:])
                await asyncio.sleep(0.1)

    async def round(self, num_groups: int, num_samples: int, num_tokens: int) -> tuple[float, float, float]:
        """Make the groups. Returns the CPU time of the busier server, the time, and the share of samples that a peer
        sampled."""
        sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
        prompt = Prompt(token_ids=(5, 6, 7), sampling=sampling, num_samples=num_samples, ground_truth="x")
        before = (await self.queue.stat()).queued
        cpu, started = self._cpu_s(), time.monotonic()
        submitted = await self.queue.submit([encode_prompt(prompt)] * num_groups, [0] * num_groups, "")
        async with asyncio.timeout(GROUPS_S):
            while (await self.queue.stat()).queued < before + num_groups:
                await self.queue.wait_for_groups(0.1)
        seconds = time.monotonic() - started
        busiest = max(after - was for was, after in zip(cpu, self._cpu_s(), strict=True))
        groups = [decode_group(await self.queue.get_group(prompt_id)) for prompt_id in submitted.prompt_ids]
        lent = sum(bool(trajectory.server_ids) for group in groups for trajectory in group.trajectories)
        await asyncio.sleep(SETTLE_S)
        return busiest, seconds, lent / (num_groups * num_samples)

    def _cpu_s(self) -> list[float]:
        times = [psutil.Process(server.pid).cpu_times() for server in self.servers]
        return [spent.user + spent.system for spent in times]

    async def end(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
        await self.client.aclose()


async def measure(folder: Path, redis: Server, num_rounds: int, num_tokens: int) -> tuple[list[Measurement], list[Bar]]:
    make_model(folder / "model", SHAPE, mean_tokens=64)
    pairs = {
        "spread": Pair("spread", folder, redis.url, spread=True),
        "one server": Pair("alone", folder, redis.url, spread=False),
    }
    measured: list[Measurement] = []
    bars: list[Bar] = []
    try:
        for pair in pairs.values():
            pair.start()
        for pair in pairs.values():
            await pair.ready()
        for case, size in CASES.items():
            cpu = {name: Measurement(f"{case}: CPU of the busier server, {name}", "s") for name in pairs}
            shares: list[float] = []
            for number in range(num_rounds + 1):
                for name in list(pairs)[:: -1 if number % 2 else 1]:
                    busiest, seconds, lent = await pairs[name].round(*size, num_tokens)
                    print(f"{case}, {name}: {busiest:.2f} s of CPU, {seconds:.1f} s, {lent:.0%} lent", flush=True)
                    if number:
                        cpu[name].rates.append(busiest)
                        shares += [lent] if name == "spread" else []
            measured += [*cpu.values(), Measurement(f"{case}: samples of the other server", "share", shares)]
            ratio = median_ratio(cpu["spread"], cpu["one server"])
            bars.append(Bar(f"{case}: CPU of the busier server, compared with not spreading", ratio, MOST[case], True))
    finally:
        for pair in pairs.values():
            await pair.end()
    return measured, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="length of the responses")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "redis").mkdir()
        redis = Server(Path(folder) / "redis")
        try:
            measured, bars = asyncio.run(measure(Path(folder), redis, arguments.rounds, arguments.tokens))
        finally:
            redis.stop()
    if (arguments.rounds, arguments.tokens) != (NUM_ROUNDS, NUM_TOKENS):
        for bar in bars:
            print(f"{bar.name}: {bar.value:.2f}, goal {bar.goal:g}")
        return 0 if all(bar.ok for bar in bars) else 1
    return 0 if report("spread", f"spread groups: two servers of {ROWS} rows", measured, bars) else 1


if __name__ == "__main__":
    sys.exit(main())
