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
from typing import TypeVar

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
BATCH = 32
"""Groups that a producer hands in, and a learner reads, at once; also redis-benchmark's pipeline."""
FLAT_GROUPS = 2_000

T = TypeVar("T")


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

    def run(self, awaitable: Awaitable[T]) -> T:
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


def measure_size(server: Server, label: str, num_bytes: int) -> tuple[list[Measurement], list[Bar]]:
    """All contenders at one payload size."""
    count = max(BYTES_A_ROUND // num_bytes // BATCH, 1) * BATCH
    loop, payload = Loop(server), os.urandom(num_bytes)
    ours = OurQueue(loop.client, f"bench-{num_bytes}", payload)

    def append() -> float:
        groups = loop.run(ours.submit(count))
        return count / loop.timed(ours.append(groups))

    def read_and_commit() -> float:
        return count / loop.timed(ours.read_and_commit(count))

    def cycle() -> float:
        groups = loop.run(ours.submit(count))
        return count / loop.timed(ours.cycle(groups))

    def stream() -> float:
        return count / loop.timed(pickled_stream(loop.client, payload, count))

    measured = alternate(
        {
            f"{label}: SET, redis-benchmark": lambda: limit(server, "set", num_bytes),
            f"{label}: append": append,
            f"{label}: read and commit": read_and_commit,
            f"{label}: GET, redis-benchmark": lambda: limit(server, "get", num_bytes),
            f"{label}: whole cycle": cycle,
            f"{label}: XADD and XREAD of pickles": stream,
            f"{label}: ray.util.queue": ray_queue_rate(num_bytes),
        },
        NUM_ROUNDS,
        "groups/s",
    )
    loop.run(loop.client.aclose())
    return list(measured.values()), size_bars(label, measured)


def size_bars(label: str, measured: dict[str, Measurement]) -> list[Bar]:
    by = {name.partition(": ")[2]: m for name, m in measured.items()}
    set_limit, get_limit = by["SET, redis-benchmark"], by["GET, redis-benchmark"]
    both = Measurement("", "", [1 / (1 / s + 1 / g) for s, g in zip(set_limit.rates, get_limit.rates, strict=True)])
    goals = {"64 KB": 0.70, "256 KB": 0.80}
    bars = [
        Bar(f"{label}: read and commit / SET", median_ratio(by["read and commit"], set_limit), 0.85),
        Bar(f"{label}: whole cycle / (SET + GET)", median_ratio(by["whole cycle"], both), 0.80),
        Bar(
            f"{label}: whole cycle / pickled stream",
            median_ratio(by["whole cycle"], by["XADD and XREAD of pickles"]),
            1.0,
        ),
        Bar(f"{label}: whole cycle / ray.util.queue", median_ratio(by["whole cycle"], by["ray.util.queue"]), 1.0),
    ]
    if label in goals:
        bars.insert(0, Bar(f"{label}: append / SET", median_ratio(by["append"], set_limit), goals[label]))
    return bars


def flatness(server: Server) -> tuple[list[Measurement], list[Bar]]:
    """Cost of an operation in a short and in a long queue, and with one and with many producers connected."""
    loop, payload = Loop(server), os.urandom(1024)
    short, long = OurQueue(loop.client, "flat-short", payload), OurQueue(loop.client, "flat-long", payload)
    loop.run(fill(short, 1_000))
    loop.run(fill(long, 200_000))

    def rate(queue: OurQueue) -> float:
        groups = loop.run(queue.submit(FLAT_GROUPS))
        return FLAT_GROUPS / loop.timed(queue.cycle(groups))

    lengths = alternate(
        {"1,000 queued": lambda: rate(short), "200,000 queued": lambda: rate(long)}, NUM_ROUNDS, "groups/s"
    )

    crowd = [connect(RedisConfig(url=server.url)) for _ in range(63)]
    alone = OurQueue(loop.client, "flat-alone", payload)

    def among_many() -> float:
        loop.run(ping_all(crowd))
        return rate(alone)

    producers = alternate({"1 producer": lambda: rate(alone), "64 producers": among_many}, NUM_ROUNDS, "groups/s")
    loop.run(close_all([*crowd, loop.client]))
    bars = [
        Bar("cycle, 200,000 queued / 1,000", median_ratio(lengths["200,000 queued"], lengths["1,000 queued"]), 0.90),
        Bar("cycle, 64 producers / 1", median_ratio(producers["64 producers"], producers["1 producer"]), 0.90),
    ]
    return [*lengths.values(), *producers.values()], bars


async def fill(queue: OurQueue, count: int) -> None:
    for start in range(0, count, 2_000):
        await queue.append(await queue.submit(min(2_000, count - start)))


async def ping_all(clients: list[redis.Redis]) -> None:
    await asyncio.gather(*(client.ping() for client in clients))


async def close_all(clients: list[redis.Redis]) -> None:
    for client in clients:
        await client.aclose()


def main() -> int:
    if shutil.which("redis-benchmark") is None:
        print("bench-replay needs redis-benchmark: apt-get install redis-tools", file=sys.stderr)
        return 2
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    measurements: list[Measurement] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for label, num_bytes in SIZES.items():
            server = Server(Path(folder) / label.replace(" ", ""))
            try:
                measured, judged = measure_size(server, label, num_bytes)
            finally:
                server.stop()
            measurements += measured
            bars += judged
        server = Server(Path(folder) / "flat")
        try:
            measured, judged = flatness(server)
        finally:
            server.stop()
    ray.shutdown()
    ok = report("replay", "the replay queue, one machine, AOF everysec", measurements + measured, bars + judged)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
