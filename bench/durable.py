"""Measures what a killed rollout server costs, and what saving tokens costs if nobody is killed.

    make bench-durable
    python bench/durable.py --speed 4        the same in a quarter of the time
    python bench/durable.py --parts places   one part; the results of the others stay as they are

Three parts:

- **kills**: two servers generate groups of eight 2,000-token samples, at 50 tokens a second and sample. Every 30 s, one
  of them is killed and started again. Once with saved tokens and once, with fewer prompts, without. A token is
  generated again if it was sampled and is in no group. With `--speed S` servers sample S times as fast and are killed S
  times as often, so as many tokens lie between two kills; only the delays of saving weigh more.
- **places**: one server with 32 rows and responses of very different lengths, once with places that are freed sample
  by sample and once group by group. This is the share of the time that rows sample.
- **cost**: CPU time per token of a server with the torch engine, with and without saving, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from durable_parts.cost import measure_cost
from harness import Bar, Measurement, earlier, report, sized
from penstock.codec import decode_group, encode_prompt
from penstock.config.rollout import RolloutConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock.trajectory import Prompt, Sampling
from replay import Server
from rollout_parts.model import ModelShape, make_model

SERVER = Path(__file__).parent / "durable_parts" / "server.py"
NUM_SAMPLES, NUM_TOKENS, TOKENS_PER_S, KILL_S, LEASE_S = sized((8, 2000, 50.0, 30.0, 15.0), (8, 40, 50.0, 30.0, 15.0))
MEAN_TOKENS = 400
"""The mean length of responses in the part `places`, where lengths are distributed exponentially."""
NUM_SERVERS, ROWS = 2, 32
NUM_GROUPS = sized(32, 4)
"""Two and a half minutes of work for both servers without kills."""
EVERY = RolloutConfig().save_every_tokens
SHAPE = ModelShape(vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=1)
REPLAY: dict[str, Any] = {
    "groups_per_step": 10**6, "max_staleness": 10**6, "capacity_bytes": 2**40, "max_attempts": 100,
}  # fmt: skip
DEADLINE_S = 1200.0
NOT_SERVING = -1


@dataclass
class Outcome:
    """What a run of servers has sampled."""

    sampled: int
    useful: int
    """Tokens in groups."""
    num_kills: int
    seconds: float
    server_names: set[str] = field(default_factory=set)
    num_mixed: int = 0
    """Trajectories that more than one server sampled."""

    @property
    def regenerated(self) -> float:
        return (self.sampled - self.useful) / self.useful


class Fleet:
    """Servers as processes, which are forked from one that has imported everything. So a kill costs no time to start,
    and what is measured does not depend on how busy the machine is."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.counters: list[Path] = []
        self.serving: dict[int, tuple[int, Path]] = {}
        path = folder / "settings.json"
        path.write_text(json.dumps(settings))
        self.parent = subprocess.Popen(
            [sys.executable, str(SERVER), str(path)], cwd=SERVER.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def start(self, number: int) -> None:
        counter = self.folder / f"counter-{len(self.counters)}"
        counter.write_bytes(struct.pack("<q", NOT_SERVING))
        self.counters.append(counter)
        assert self.parent.stdin is not None and self.parent.stdout is not None
        print(f"server-{number} {counter}", file=self.parent.stdin, flush=True)
        self.serving[number] = int(self.parent.stdout.readline()), counter

    def kill(self, number: int) -> None:
        os.kill(self.serving[number][0], signal.SIGKILL)

    def end(self) -> None:
        """The servers end with the process that they were forked from."""
        self.parent.kill()
        self.parent.wait()

    @property
    def are_serving(self) -> bool:
        return all(_read(counter) > NOT_SERVING for _, counter in self.serving.values())

    @property
    def num_sampled(self) -> int:
        return sum(max(0, _read(counter)) for counter in self.counters)


def _read(counter: Path) -> int:
    count: int = struct.unpack("<q", counter.read_bytes())[0]
    return count


async def run_fleet(
    redis: Server, model: Path, prompts: list[Prompt], num_servers: int, kill_s: float | None, **settings: Any
) -> Outcome:
    """Let servers make the groups of the prompts. One of them is killed every `kill_s`."""
    client = connect(RedisConfig(url=redis.url))
    await client.flushdb()
    queue = RedisReplayQueue(client, "durable", ReplayConfig(**settings["replay"]))
    prompt_ids = (await queue.submit([encode_prompt(prompt) for prompt in prompts], [0] * len(prompts), "")).prompt_ids
    num_kills, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), {**settings, "redis": redis.url, "model": str(model)})
        try:
            for number in range(num_servers):
                fleet.start(number)
            while not fleet.are_serving:
                time.sleep(0.02)  # noqa: ASYNC251  nothing else runs here
            started = time.monotonic()
            next_kill = started + kill_s if kill_s else float("inf")
            while (await queue.stat()).queued < len(prompts):
                if time.monotonic() > started + DEADLINE_S:
                    raise SystemExit(f"not done after {DEADLINE_S:g} s: {await queue.stat()}")
                if time.monotonic() > next_kill and fleet.are_serving:
                    fleet.kill(num_kills % num_servers)
                    fleet.start(num_kills % num_servers)
                    num_kills += 1
                    next_kill = time.monotonic() + (kill_s or 0.0)
                await asyncio.sleep(0.02)
            seconds, sampled = time.monotonic() - started, fleet.num_sampled
        finally:
            fleet.end()
    outcome = Outcome(sampled, 0, num_kills, seconds)
    for prompt_id in prompt_ids:
        for trajectory in decode_group(await queue.get_group(prompt_id)).trajectories:
            outcome.useful += len(trajectory.token_ids)
            outcome.num_mixed += len(trajectory.server_ids) > 1
    await client.aclose()
    return outcome


async def measure_kills(redis: Server, model: Path, speed: float) -> tuple[list[Measurement], list[Bar]]:
    sampling = Sampling(max_tokens=NUM_TOKENS)
    prompts = [Prompt(token_ids=(5, 6, 7), sampling=sampling, num_samples=NUM_SAMPLES)] * NUM_GROUPS
    shares = {}
    for name, every, num_groups in (("saved", EVERY, NUM_GROUPS), ("not saved", 0, NUM_GROUPS // 2)):
        outcome = await run_fleet(
            redis, model, prompts[:num_groups], NUM_SERVERS, KILL_S / speed,
            tokens_per_s=TOKENS_PER_S * speed, rows=ROWS, groups=ROWS // NUM_SAMPLES, by_group=False,
            save_every_tokens=every, replay={**REPLAY, "lease_ttl_s": LEASE_S / speed},
        )  # fmt: skip
        shares[name] = outcome
        print(f"{name}: {outcome.regenerated:.1%} of {outcome.useful} tokens again, {outcome.num_kills} kills, "
              f"{outcome.num_mixed} samples of two servers or more, {outcome.seconds:.0f} s", flush=True)  # fmt: skip
    measured = [
        Measurement(f"tokens generated again, {name}", "of the tokens in groups", [outcome.regenerated])
        for name, outcome in shares.items()
    ]
    return measured, [
        Bar("tokens generated again, a kill every 30 s, 2,000-token samples", shares["saved"].regenerated, 0.05, True),
        Bar("the same without saved tokens, divided by it", _ratio(shares), 4.0),
    ]


def _ratio(shares: dict[str, Outcome]) -> float:
    return shares["not saved"].regenerated / max(shares["saved"].regenerated, 1e-6)


async def measure_places(redis: Server, model: Path, speed: float) -> tuple[list[Measurement], list[Bar]]:
    prompts = [Prompt(token_ids=(5, 6, 7), sampling=Sampling(max_tokens=4000), num_samples=NUM_SAMPLES)] * 64
    shares = {}
    for name, by_group in (("sample by sample", False), ("group by group", True)):
        outcome = await run_fleet(
            redis, model, prompts, 1, None, tokens_per_s=TOKENS_PER_S * 4 * speed, rows=ROWS,
            groups=ROWS // NUM_SAMPLES, by_group=by_group, save_every_tokens=EVERY, mean_tokens=MEAN_TOKENS,
            replay={**REPLAY, "lease_ttl_s": LEASE_S},
        )  # fmt: skip
        shares[name] = outcome.useful / outcome.seconds / (TOKENS_PER_S * 4 * speed * ROWS)
        print(f"places {name}: {shares[name]:.0%} of the rows sample, {outcome.seconds:.0f} s", flush=True)
    measured = [
        Measurement(f"rows that sample, places freed {name}", "share", [share]) for name, share in shares.items()
    ]
    ratio = shares["sample by sample"] / shares["group by group"]
    return measured, [Bar("tokens/s with places freed sample by sample, compared with group by group", ratio, 1.3)]


async def measure(speed: float, folder: Path, redis: Server, parts: list[str]) -> tuple[list[Measurement], list[Bar]]:
    model = make_model(folder / "model", SHAPE, mean_tokens=64)
    measured: list[Measurement] = []
    bars: list[Bar] = []
    for name, part in (("kills", measure_kills), ("places", measure_places)):
        if name in parts:
            more, judged = await part(redis, model, speed)
            measured, bars = measured + more, bars + judged
    if "cost" in parts:
        more, judged = await measure_cost(redis, folder, EVERY)
        measured, bars = measured + more, bars + judged
    return measured, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=sized(1.0, 10.0))
    parser.add_argument("--parts", nargs="+", default=sized(["kills", "places", "cost"], ["places"]))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "redis").mkdir()
        redis = Server(Path(folder) / "redis")
        try:
            measured, bars = asyncio.run(measure(arguments.speed, Path(folder), redis, arguments.parts))
        finally:
            redis.stop()
    kept, judged = earlier("durable", measured, bars)
    measured, bars = kept + measured, judged + bars
    title = f"saved tokens: two servers of {ROWS} rows, {arguments.speed:g} times as fast as in the goal"
    return 0 if report("durable", title, measured, bars) else 1


if __name__ == "__main__":
    sys.exit(main())
