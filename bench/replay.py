"""The replay queue against the limit of Redis, against Ray's queue, and against XADD of pickles.

    make bench-replay

The limit is `redis-benchmark` (Debian's redis-tools) on the same server, the same payload, connections and pipelining.
All contenders take turns in every round; a bar is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import redis.asyncio as redis
from harness import Bar, Measurement, alternate, median_ratio, report

from penstock.config.service import RedisConfig, ReplayConfig
from penstock.ports import free_port, wait_for_port
from penstock.replay.contract import FinishedGroup
from penstock.replay.redis_queue import RedisReplayQueue, connect
from penstock_services.local.private_redis import find_redis_server, write_config

SIZES = {"16 KB": 16 * 1024, "64 KB": 64 * 1024, "256 KB": 256 * 1024}
BYTES_A_ROUND = 48 * 2**20
NUM_ROUNDS = 7
BATCH = 16
"""Groups that a producer hands in, and a learner reads, at once; also redis-benchmark's pipeline."""
RAY_ROUNDS = 3


class Server:
    """A private Redis with the settings of a run: append-only file, fsync every second."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        config, self.url = write_config(folder, self.port)
        self.process = subprocess.Popen(
            [find_redis_server(), str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if not wait_for_port("127.0.0.1", self.port, timeout_s=20):
            raise SystemExit("Redis did not start")
        self.password = (folder / "password").read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def limit(server: Server, command: str, num_bytes: int) -> float:
    """Requests a second of redis-benchmark, one connection, pipelined like ours."""
    count = max(BYTES_A_ROUND // num_bytes, BATCH)
    arguments = ["-p", str(server.port), "-a", server.password, "-t", command, "-d", str(num_bytes), "-c", "1"]
    arguments += ["-P", str(BATCH), "-n", str(count), "-r", "1000", "-q"]
    result = subprocess.run(["redis-benchmark", *arguments], capture_output=True, text=True, check=True, timeout=300)
    return float(re.findall(rf"{command.upper()}: ([\d.]+)", result.stdout)[-1])


class OurQueue:
    """One run's queue, filled and emptied through the contract."""

    def __init__(self, client: redis.Redis, run: str, payload: bytes) -> None:
        replay = ReplayConfig(groups_per_step=10**6, max_staleness=10**6, capacity_bytes=2**40)
        self.queue = RedisReplayQueue(client, run, replay)
        self.payload = payload
        self.step = 0

    async def submit(self, count: int) -> list[FinishedGroup]:
        """Leases to hand groups in for; not part of what is measured."""
        for start in range(0, count, 1000):
            size = min(1000, count - start)
            await self.queue.submit([b"prompt"] * size, [0] * size, "")
        leases = await self.queue.lease("bench", count)
        return [FinishedGroup(lease, self.payload, 0) for lease in leases]

    async def append(self, groups: list[FinishedGroup]) -> None:
        for start in range(0, len(groups), BATCH):
            await self.queue.append_many(groups[start : start + BATCH])

    async def read_and_commit(self, count: int) -> None:
        if self.queue.term == 0:
            await self.queue.take_term(0)
        while count > 0:
            self.step += 1
            taken = await self.queue.take(self.step, min(BATCH, count))
            await self.queue.fetch(taken)
            await self.queue.commit(self.step, taken)
            count -= len(taken)

    async def cycle(self, groups: list[FinishedGroup]) -> None:
        """Bounded: never more than one batch is queued."""
        for start in range(0, len(groups), BATCH):
            batch = groups[start : start + BATCH]
            await self.queue.append_many(batch)
            await self.read_and_commit(len(batch))


class Loop:
    """An event loop with a client on it, for contenders that are plain functions."""

    def __init__(self, server: Server) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = connect(RedisConfig(url=server.url))

    def run[T](self, awaitable: Awaitable[T]) -> T:
        return self.loop.run_until_complete(awaitable)

    def timed(self, awaitable: Awaitable[object]) -> float:
        started = time.perf_counter()
        self.run(awaitable)
        return time.perf_counter() - started


async def pickled_stream(client: redis.Redis, payload: bytes, count: int) -> None:
    """What peers do: XADD a pickle, XREAD it, one at a time."""
    await client.delete("peer")
    last = b"0"
    for index in range(count):
        await client.xadd("peer", {"data": pickle.dumps({"id": index, "group": payload})})
    for _ in range(count):
        [(_, [(last, fields)])] = await client.xread({"peer": last}, count=1)
        pickle.loads(fields[b"data"])
    await client.delete("peer")


def ray_queue_rate(num_bytes: int) -> Callable[[], float]:
    import ray
    from ray.util.queue import Queue

    payload = os.urandom(num_bytes)
    queue = Queue()

    def run() -> float:
        count = 64
        started = time.perf_counter()
        for _ in range(count):
            queue.put(payload)
        for _ in range(count):
            queue.get()
        return count / (time.perf_counter() - started)

    assert ray.is_initialized()
    return run
