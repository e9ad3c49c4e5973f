"""Rollout servers for `bench/durable.py`: everything is real but the engine, which takes time and computes nothing.

    python bench/durable_parts/server.py SETTINGS.json

For each line `SERVER_ID COUNTER_FILE` of its standard input, it forks a server and prints its process id. Each row of a
server's engine samples `tokens_per_s`. The number of tokens that were sampled so far is in COUNTER_FILE, 50 times a
second, so that it is known after a SIGKILL.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.config.rollout import AdaptiveConcurrencyConfig, AgentsConfig, RewardConfig, RolloutConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock.trajectory import FinishReason, VersionSegment
from penstock_rollout.agents.registry import Agents
from penstock_rollout.agents.saved_samples import TokenSaver
from penstock_rollout.engines.engine import EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization

COUNT_S = 0.02
PR_SET_PDEATHSIG = 1
MAX_MODEL_LEN = 1 << 20


class TimedEngine:
    """`rows` requests sample at once, the others wait. A chunk comes when its last token would have been sampled."""

    name = "timed"
    policy_version = 0

    def __init__(self, tokens_per_s: float, rows: int, mean_tokens: float | None) -> None:
        self.tokens_per_s = tokens_per_s
        self.mean_tokens = mean_tokens
        """If given, responses end by themselves. The length depends on the prompt and the sample alone."""
        self._rows = asyncio.Semaphore(rows)
        self._sampled_before = 0
        self._running: dict[str, tuple[float, int]] = {}
        """Start and number of tokens of the requests that sample."""

    @property
    def num_sampled(self) -> int:
        now = time.monotonic()
        running = (min(limit, int((now - start) * self.tokens_per_s)) for start, limit in self._running.values())
        return self._sampled_before + sum(running)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        limit, delivered = self._length(request), 0
        async with self._rows:
            start = time.monotonic()
            self._running[request.request_id] = (start, limit)
            try:
                while delivered < limit:
                    end = min(limit, delivered + request.min_chunk_tokens) if request.stream else limit
                    await asyncio.sleep(start + end / self.tokens_per_s - time.monotonic())
                    yield _chunk(len(request.prompt_token_ids), delivered, end, "length" if end == limit else None)
                    delivered = end
            finally:
                del self._running[request.request_id]
                self._sampled_before += min(limit, int((time.monotonic() - start) * self.tokens_per_s))

    def _length(self, request: GenerateRequest) -> int:
        prompt_id, _, sample, _ = request.request_id.split(".")
        if self.mean_tokens is None:
            return request.sampling.max_tokens
        length = 1 + int(random.Random(f"{prompt_id} {sample}").expovariate(1 / self.mean_tokens))
        return min(length, request.sampling.max_tokens)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        """Nothing is handed over: the benchmark only kills."""

    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 0.0)


def _chunk(prompt: int, start: int, end: int, reason: FinishReason | None) -> TokenChunk:
    ids = tuple(2 + (prompt + index) * 7919 % 61 for index in range(start, end))
    return TokenChunk(ids, tuple(-1 / token for token in ids), (VersionSegment(start, end, 0),), reason)


async def count(engine: TimedEngine, path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
        while True:
            counter[:8] = struct.pack("<q", engine.num_sampled)
            await asyncio.sleep(COUNT_S)


async def serve(settings: dict[str, Any], server_id: str, counter: Path) -> None:
    replay, metrics = ReplayConfig(**settings["replay"]), RolloutMetrics(CollectorRegistry())
    engine: Any = TimedEngine(settings["tokens_per_s"], settings["rows"], settings.get("mean_tokens"))
    queue = RedisReplayQueue(connect(RedisConfig(url=settings["redis"])), "durable", replay)
    tokenization = Tokenization(Path(settings["model"]))
    agents = Agents.load(AgentsConfig(), MAX_MODEL_LEN, tokenization)
    saver = TokenSaver(queue, engine, server_id, metrics, settings["save_every_tokens"], replay.max_staleness)
    scorer = Scorer(RewardConfig(), metrics)
    maker = GroupMaker("durable", server_id, engine, tokenization, scorer, metrics, agents, saver=saver)
    rollout = RolloutConfig(
        max_concurrent_groups=settings["groups"], adaptive_concurrency=AdaptiveConcurrencyConfig(enabled=False)
    )
    producer = Producer(queue, server_id, maker, rollout, replay, metrics, may_lease=lambda: True, saver=saver)
    if settings["by_group"]:
        producer._note_running = lambda *_: None  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        for loop in (
            producer.lease_loop(), producer.heartbeat_loop(), producer.reconcile_loop(), saver.save_loop(),
            count(engine, counter),
        ):  # fmt: skip
            tasks.create_task(loop)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    Tokenization(Path(settings["model"])).text_ids("warm")  # imports what the servers need
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for killed servers
    for line in sys.stdin:
        server_id, counter = line.split()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            asyncio.run(serve(settings, server_id, Path(counter)))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
