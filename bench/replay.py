"""Compares the replay queue with the limit of Redis, with Ray's queue, and with XADD of pickles.

    make bench-replay

The limit is `redis-benchmark` (Debian's redis-tools) on the same server, with the same payload and one connection. It
is the best of several pipeline depths, up to our groups per batch, because redis-benchmark is slow with many large
payloads. All contenders take turns in every round, and every other round reverses the order. A bar is the median over
rounds of the ratio within a round.

Redis runs with the settings of a run: append-only file, fsync every second. The file is in memory if the machine has
/dev/shm, because a disk is slower than any contender here and would dominate the result. Redis rewrites the file
between rounds, never during one.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from harness import (
    SMOKE,
    Bar,
    Measurement,
    alternate,
    make_parser,
    median_ratio,
    redis_process,
    report,
    report_skipped,
    sized,
)
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import FinishedGroup
from penstock.store.redis_client import EXCHANGES_AT_ONCE, RedisClient, connect

SIZES = {"16 KB": 16 * 1024, "64 KB": 64 * 1024, "256 KB": 256 * 1024} if not SMOKE else {"64 KB": 64 * 1024}
BYTES_PER_ROUND = sized(48, 4) * 2**20
NUM_ROUNDS = sized(15, 1)
BATCH = 64
"""Groups that a producer appends, and a learner reads, in one call."""
PIPELINES = (4, 16, BATCH)
QUEUED_BATCHES = 3
"""In the whole cycle, the producer waits while this many batches are not yet committed."""
FLAT_GROUPS = sized(2_048, 64)
SMALL_BYTES = 1024
PEER_GROUPS = sized(128, 4)

T = TypeVar("T")


def server_in(folder: Path) -> AbstractContextManager[tuple[int, str]]:
    """A Redis that rewrites its append-only file only on request."""
    return redis_process(folder, "auto-aof-rewrite-percentage 0\n")


def best_depth(url: str, command: str, num_bytes: int) -> int:
    """The pipeline depth at which redis-benchmark is fastest. It is found before the rounds."""
    rates = {depth: [limit(url, command, num_bytes, depth) for _ in range(3)] for depth in PIPELINES}
    return max(rates, key=lambda depth: statistics.median(rates[depth]))


def limit(url: str, command: str, num_bytes: int, depth: int) -> float:
    """Requests per second of redis-benchmark over one connection."""
    count = max(BYTES_PER_ROUND // num_bytes, BATCH)
    server = urlsplit(url)
    where = ["-p", str(server.port), "-a", unquote(server.password or "")]
    arguments = [*where, "-t", command, "-d", str(num_bytes), "-c", "1"]
    arguments += ["-P", str(depth), "-n", str(count), "-r", "1000", "-q"]
    result = subprocess.run(["redis-benchmark", *arguments], capture_output=True, text=True, check=True, timeout=300)
    return float(re.findall(rf"{command.upper()}: ([\d.]+)", result.stdout)[-1])


class OurQueue:
    """The queue of one run. A producer fills it and a learner empties it, each with its own client."""

    def __init__(self, clients: Clients, run: str, payload: bytes) -> None:
        replay = ReplayConfig(groups_per_step=10**6, max_staleness=10**6, capacity_bytes=2**40)
        self.producer = RedisReplayQueue(clients.producer, run, replay)
        self.learner = RedisReplayQueue(clients.learner, run, replay)
        self.payload = payload
        self.step = 0

    async def submit(self, count: int) -> list[FinishedGroup]:
        """Lease the prompts of the groups to append. This is not measured."""
        if self.learner.term == 0:
            await self.learner.take_term(0)
        for start in range(0, count, 1000):
            size = min(1000, count - start)
            await self.producer.submit([b"prompt"] * size, [0] * size, "")
        leases = await self.producer.lease("bench", count)
        return [FinishedGroup(lease, self.payload, 0) for lease in leases]

    async def append(self, groups: list[FinishedGroup]) -> None:
        await self._produce(groups, asyncio.Semaphore(len(groups)), asyncio.Semaphore(0))

    async def _produce(self, groups: list[FinishedGroup], room: asyncio.Semaphore, ready: asyncio.Semaphore) -> None:
        """Append batch after batch, as a rollout server does, with as many in progress as its client allows."""
        batches = (groups[start : start + BATCH] for start in range(0, len(groups), BATCH))

        async def send() -> None:
            for batch in batches:
                await room.acquire()
                await self.producer.append_many(batch)
                ready.release()

        await asyncio.gather(*(send() for _ in range(EXCHANGES_AT_ONCE)))

    async def read_and_commit(self, count: int) -> None:
        ready = asyncio.Semaphore(count)
        await self._learn(count, ready, asyncio.Semaphore(0))

    async def cycle(self, groups: list[FinishedGroup]) -> None:
        """Append batches while the learner reads and commits earlier ones, with a bounded number in between."""
        room, ready = asyncio.Semaphore(QUEUED_BATCHES), asyncio.Semaphore(0)
        await asyncio.gather(self._produce(groups, room, ready), self._learn(len(groups), ready, room))

    async def _learn(self, count: int, ready: asyncio.Semaphore, room: asyncio.Semaphore) -> None:
        """Read and commit as the learner does: the next batch is read while one is committed."""

        async def commit(step: int, taken: list[int]) -> None:
            await self.learner.commit(step, taken)
            room.release()

        committing: asyncio.Task[None] | None = None
        for start in range(0, count, BATCH):
            await ready.acquire()
            self.step += 1
            taken = await self._read(min(BATCH, count - start))
            if committing is not None:
                await committing
            committing = asyncio.create_task(commit(self.step, taken))
        assert committing is not None
        await committing

    async def drain(self) -> None:
        """Empty the queue without reading. This is not measured."""
        self.step += 1
        while taken := await self.learner.take(self.step, 1000):
            await self.learner.commit(self.step, taken)

    async def _read(self, count: int) -> list[int]:
        taken = await self.learner.take(self.step, count)
        deliveries = await self.learner.fetch(taken)
        assert len(deliveries) == count
        return taken


class Clients:
    """An event loop with clients on it, for contenders that are plain functions."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.producer = connect(RedisConfig(url=url, timeout_s=60))
        self.learner = connect(RedisConfig(url=url, timeout_s=60))

    def run(self, awaitable: Awaitable[T]) -> T:
        return self.loop.run_until_complete(awaitable)

    def timed(self, awaitable: Awaitable[object]) -> float:
        started = time.perf_counter()
        self.run(awaitable)
        return time.perf_counter() - started

    def rewrite_log(self) -> None:
        """Rewrite the append-only file to keep it small, and wait for it. Nothing is measured meanwhile."""
        self.run(self._rewrite_log())

    async def _rewrite_log(self) -> None:
        await self.learner.bgrewriteaof()
        async with asyncio.timeout(120):
            while (await self.learner.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def close(self) -> None:
        self.run(self.producer.aclose())
        self.run(self.learner.aclose())
        self.loop.close()


async def pickled_stream(client: RedisClient, payload: bytes, count: int) -> None:
    """XADD a pickle and XREAD it, one at a time, as other projects do."""
    await client.delete("peer")
    last = b"0"
    for index in range(count):
        await client.xadd("peer", {"data": pickle.dumps({"id": index, "group": payload})})
    for _ in range(count):
        read: Any = await client.xread({"peer": last}, count=1)
        [(_, [(last, fields)])] = read
        pickle.loads(fields[b"data"])
    await client.delete("peer")


def ray_queue_rate(num_bytes: int) -> Callable[[], float]:
    import ray
    from ray.util.queue import Queue

    payload = os.urandom(num_bytes)
    queue = Queue()

    def run() -> float:
        started = time.perf_counter()
        for _ in range(PEER_GROUPS):
            queue.put(payload)
        for _ in range(PEER_GROUPS):
            queue.get()
        return PEER_GROUPS / (time.perf_counter() - started)

    assert ray.is_initialized()
    return run


def measure_size(url: str, label: str, num_bytes: int) -> tuple[list[Measurement], list[Bar]]:
    """All contenders at one payload size."""
    count = max(BYTES_PER_ROUND // num_bytes // BATCH, 1) * BATCH
    clients, payload = Clients(url), os.urandom(num_bytes)
    ours = OurQueue(clients, f"bench-{num_bytes}", payload)

    def append() -> float:
        groups = clients.run(ours.submit(count))
        rate = count / clients.timed(ours.append(groups))
        clients.run(ours.drain())
        return rate

    def read_and_commit() -> float:
        clients.run(ours.append(clients.run(ours.submit(count))))
        return count / clients.timed(ours.read_and_commit(count))

    def cycle() -> float:
        groups = clients.run(ours.submit(count))
        return count / clients.timed(ours.cycle(groups))

    def stream() -> float:
        return PEER_GROUPS / clients.timed(pickled_stream(clients.learner, payload, PEER_GROUPS))

    depths = {command: best_depth(url, command, num_bytes) for command in ("set", "get")}
    measured = alternate(
        {
            f"{label}: SET, redis-benchmark": lambda: limit(url, "set", num_bytes, depths["set"]),
            f"{label}: append": append,
            f"{label}: read and commit": read_and_commit,
            f"{label}: GET, redis-benchmark": lambda: limit(url, "get", num_bytes, depths["get"]),
            f"{label}: whole cycle": cycle,
            f"{label}: XADD and XREAD of pickles": stream,
            f"{label}: ray.util.queue": ray_queue_rate(num_bytes),
        },
        NUM_ROUNDS,
        "groups/s",
        between=clients.rewrite_log,
    )
    clients.close()
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
    if label == "16 KB":
        # Half a cycle of a small group is calls, not bytes: the goal on the way to 0.8.
        bars.insert(2, Bar(f"{label}: whole cycle / (SET + GET), small groups", bars[1].value, 0.60))
    if label in goals:
        bars.insert(0, Bar(f"{label}: append / SET", median_ratio(by["append"], set_limit), goals[label]))
    return bars


def flatness(url: str) -> tuple[list[Measurement], list[Bar]]:
    """Cost of an operation in a short and a long queue, and with one and with many connected producers."""
    clients, payload = Clients(url), os.urandom(SMALL_BYTES)
    short, long = OurQueue(clients, "flat-short", payload), OurQueue(clients, "flat-long", payload)
    clients.run(fill(short, 1_000))
    clients.run(fill(long, sized(200_000, 2_000)))

    def rate(queue: OurQueue) -> float:
        groups = clients.run(queue.submit(FLAT_GROUPS))
        return FLAT_GROUPS / clients.timed(queue.cycle(groups))

    lengths = alternate(
        {"1,000 queued": lambda: rate(short), "200,000 queued": lambda: rate(long)}, NUM_ROUNDS, "groups/s"
    )

    crowd = [connect(RedisConfig(url=url)) for _ in range(63)]
    alone = OurQueue(clients, "flat-alone", payload)

    def among_many() -> float:
        clients.run(ping_all(crowd))
        return rate(alone)

    producers = alternate({"1 producer": lambda: rate(alone), "64 producers": among_many}, NUM_ROUNDS, "groups/s")
    clients.run(close_all(crowd))
    clients.close()
    bars = [
        Bar("cycle, 200,000 queued / 1,000", median_ratio(lengths["200,000 queued"], lengths["1,000 queued"]), 0.90),
        Bar("cycle, 64 producers / 1", median_ratio(producers["64 producers"], producers["1 producer"]), 0.90),
    ]
    return [*lengths.values(), *producers.values()], bars


async def fill(queue: OurQueue, count: int) -> None:
    for start in range(0, count, 2_000):
        await queue.append(await queue.submit(min(2_000, count - start)))


async def ping_all(clients: list[RedisClient]) -> None:
    await asyncio.gather(*(client.ping() for client in clients))


async def close_all(clients: list[RedisClient]) -> None:
    for client in clients:
        await client.aclose()


def main() -> int:
    make_parser().parse_args()
    sizes = SIZES
    if shutil.which("redis-benchmark") is None:
        if not SMOKE:
            print("bench-replay needs redis-benchmark: apt-get install redis-tools", file=sys.stderr)
            return 2
        report_skipped("the cost of a group", "there is no redis-benchmark")
        sizes = {}
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    measurements: list[Measurement] = []
    bars: list[Bar] = []
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=in_memory if in_memory.is_dir() else None) as folder:
        for label, num_bytes in sizes.items():
            with server_in(Path(folder) / label.replace(" ", "")) as (_, url):
                measured, judged = measure_size(url, label, num_bytes)
            measurements += measured
            bars += judged
        with server_in(Path(folder) / "flat") as (_, url):
            measured, judged = flatness(url)
    ray.shutdown()
    ok = report("replay", "the replay queue, one machine, AOF everysec", measurements + measured, bars + judged)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
