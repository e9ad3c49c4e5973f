"""The chaos run: Redis, two producers and a learner process numbered prompts while faults, chosen by a seed, hit them.

| loop      | does                                                                                   |
|-----------|----------------------------------------------------------------------------------------|
| clients   | submit every prompt; after each Redis restart, submit again, in another order          |
| killer    | causes the next fault of the schedule once the learner has reached its step            |
| restarter | starts processes again that have ended; a producer that ended by itself is an error    |
| observer  | samples conservation, progress and the size of Redis' log; no progress is an error     |

Faults are scheduled by step, not by time, so their number does not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from penstock.config.service import RedisConfig
from penstock.errors import PenstockError, Unavailable
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.redis_client import connect
from penstock_learner.checkpoints import CheckpointStore, read_state
from penstock_learner.crash_points import NAMES as CRASH_POINTS
from support.chaos.learner_process import TOOK_OVER, Folded
from support.chaos.processes import LOSS_WINDOW_S, Child, LosingRedis
from support.chaos.workload import FENCED, RUN, TOO_LATE, UNAVAILABLE, Settings, make_payload
from support.faults.proxy import FaultyProxy, LostReplies

T = TypeVar("T")
Fault = Literal["kill producer", "kill learner", "crash point", "zombie learner", "kill redis", "cut redis' tail"]
LEARNER_ENDS = {FENCED: "fenced", UNAVAILABLE: "no redis", TOO_LATE: "no batch in time"}
STALL_S = 180.0
"""A run without progress for this long has failed. Every recovery takes far less."""
APPEND_MARK = b":group:"
"""Every append's SET contains this, and no other request of a producer does."""
PROMPTS_PER_SUBMISSION = 5
BACKLOG = 120
"""Clients submit while fewer prompts than this are pending, so that Redis can always lose young prompts."""


@dataclass(frozen=True)
class Plan:
    num_groups: int
    num_faults: int = 0
    seed: int = 0
    groups_per_step: int = 5
    max_staleness: int = 2
    lost_replies: float = 0.0
    """Share of one producer's appends whose reply is lost."""
    loss_window_s: float = LOSS_WINDOW_S + 0.25
    """Wait before a prompt is leased or a learner acts, because `cut_tail` could still undo the writes before."""

    def schedule(self) -> list[tuple[int, Fault]]:
        """Steps and their faults, spread over the run. Every kind of fault occurs equally often."""
        dice = random.Random(self.seed)
        kinds = list(itertools.islice(itertools.cycle(get_args(Fault)), self.num_faults))
        dice.shuffle(kinds)
        num_steps = self.num_groups // self.groups_per_step
        steps = sorted(dice.randint(1, max(1, int(num_steps * 0.9))) for _ in kinds)
        return list(zip(steps, kinds, strict=True))


@dataclass
class Report:
    """The faults and progress of a run, and the state that it left in Redis."""

    faults: Counter[str] = field(default_factory=Counter)
    learner_ends: Counter[str] = field(default_factory=Counter)
    lost_replies: int = 0
    cut_bytes: int = 0
    redelivered: int = 0
    reclaimed: int = 0
    num_samples: int = 0
    longest_stall_s: float = 0.0
    seconds: float = 0.0
    times: Counter[int] = field(default_factory=Counter)
    """How often each prompt, by number, is in the last checkpoint."""
    content: int = 0
    ledger: list[tuple[int, int]] = field(default_factory=list)
    stat: QueueStat | None = None
    keys: set[str] = field(default_factory=set)
    """Keys left in Redis, without the run's prefix. Keys of submissions are counted instead."""
    num_submissions: int = 0
    open_manifests: dict[int, list[int]] = field(default_factory=dict)


class ChaosRun:
    """One run in one folder. Use each object once."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.report = Report()
        self.redis = LosingRedis(folder / "redis", plan.seed)
        self.settings = Settings(
            redis_url=self.redis.url,
            checkpoints=str(folder / "checkpoints"),
            replay={
                "groups_per_step": plan.groups_per_step,
                "max_staleness": plan.max_staleness,
                "lease_ttl_s": 2.0,
                "max_attempts": 50,
                "loss_window_s": plan.loss_window_s,
            },
        )
        self.settings_file = folder / "settings.json"
        self.redis_starts = 0
        self.best_step = 0
        self.last_stat: QueueStat | None = None

    async def run(self) -> Report:
        started = time.monotonic()
        self.settings.save(self.settings_file)
        async with self._everything():
            work = [self._clients(), self._restarter(), self._observer(), self._kill_and_finish()]
            tasks = [asyncio.create_task(coroutine) for coroutine in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self.report.seconds = time.monotonic() - started
        return self.report

    @asynccontextmanager
    async def _everything(self) -> AsyncIterator[None]:
        """Run to the end. All processes started here are ended here, however the run ends."""
        lost_replies = LostReplies(APPEND_MARK, self.plan.lost_replies, self.plan.seed)
        async with FaultyProxy(("127.0.0.1", self.redis.port), lost_replies=lost_replies) as self.proxy:
            proxied = self.redis.url.replace(f":{self.redis.port}/", f":{self.proxy.port}/")
            self.producers = [self._producer("rollout-0", self.redis.url), self._producer("rollout-1", proxied)]
            self.learner = self._learner("learner-0")
            self.children = [*self.producers, self.learner]
            self.client = connect(RedisConfig(url=self.redis.url, timeout_s=self.settings.redis_timeout_s))
            self.queue = RedisReplayQueue(self.client, RUN, self.settings.replay_config)
            try:
                await self._start_redis()
                for child in self.children:
                    child.start()
                yield
            finally:
                for child in self.children:
                    child.kill()
                self.redis.kill()
                await self.client.aclose()

    def _producer(self, name: str, redis_url: str) -> Child:
        arguments = ["--settings", str(self.settings_file), "--redis-url", redis_url, "--server-id", name]
        return Child(name, "support.chaos.producer_process", arguments, self.folder)

    def _learner(self, name: str) -> Child:
        return Child(name, "support.chaos.learner_process", ["--settings", str(self.settings_file)], self.folder)

    # ── loops ──

    async def _clients(self) -> None:
        """Submit prompts under idempotency keys. After a restart of Redis, submit again, the youngest submissions
        first."""
        size = PROMPTS_PER_SUBMISSION
        unsent = [list(range(first, first + size)) for first in range(1, self.plan.num_groups + 1, size)]
        sent: list[list[int]] = []
        seen_starts = self.redis_starts
        while True:
            if seen_starts != self.redis_starts:
                seen_starts = self.redis_starts
                again = unsent[:2] + self.random.sample(sent, len(sent))
                sent, unsent = sent + unsent[:2], unsent[2:]
                for numbers in again:
                    await self._submit(numbers)
            elif unsent and (await self._stat()).pending_prompts < BACKLOG:
                numbers = unsent.pop(0)
                sent.append(numbers)
                await self._submit(numbers)
            else:
                await asyncio.sleep(0.05)

    async def _submit(self, numbers: list[int]) -> None:
        payloads = [make_payload(number) for number in numbers]
        await self._until_redis_answers(
            lambda: self.queue.submit(payloads, [0] * len(numbers), f"client-{numbers[0] % 2}/{numbers[0]}")
        )

    async def _restarter(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for child in self.producers:
                if child.exit_code is not None:
                    assert child.is_expected_to_die, f"{child.name} ended by itself:\n{child.last_words()}"
                    child.start()
            code = self.learner.exit_code
            if code is not None:
                if not self.learner.is_expected_to_die:
                    assert code in LEARNER_ENDS, f"the learner ended with {code}:\n{self.learner.last_words()}"
                    self.report.learner_ends[LEARNER_ENDS[code]] += 1
                self.learner.start()

    async def _observer(self) -> None:
        progress_at = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            self.redis.sample()
            with suppress(Unavailable):
                stat = await self.queue.stat()
                assert stat.conservation_error == 0, stat
                self.report.num_samples += 1
                self.report.redelivered = max(self.report.redelivered, stat.redelivered)
                self.report.reclaimed = max(self.report.reclaimed, stat.reclaimed)
                self.last_stat = stat
                if stat.step > self.best_step:
                    self.best_step = stat.step
                    progress_at = time.monotonic()
            stalled_s = time.monotonic() - progress_at
            self.report.longest_stall_s = max(self.report.longest_stall_s, stalled_s)
            if stalled_s > STALL_S:
                logs = "\n".join(f"── {child.name}\n{child.last_words()}" for child in self.children)
                raise AssertionError(f"no progress for {STALL_S:.0f} s: {self.last_stat}\n{logs}")

    async def _kill_and_finish(self) -> None:
        faults: dict[Fault, Callable[[], Awaitable[None]]] = {
            "kill producer": self._kill_producer,
            "kill learner": self._kill_learner,
            "crash point": self._crash_at_a_named_point,
            "zombie learner": self._raise_a_zombie,
            "kill redis": self._kill_redis,
            "cut redis' tail": self._cut_redis,
        }
        for step, fault in self.plan.schedule():
            # The observer ends the run if there is no step, so this wait needs no deadline.
            await _until(lambda step=step: self.best_step >= step, timeout_s=None)
            await asyncio.sleep(self.random.uniform(0, 0.5))
            await faults[fault]()
            self.report.faults[fault] += 1
        await self._drain()
        await self._take_stock()

    # ── faults ──

    async def _kill_producer(self) -> None:
        self.random.choice(self.producers).kill()

    async def _kill_learner(self) -> None:
        self.learner.kill()

    async def _crash_at_a_named_point(self) -> None:
        self.learner.kill()
        place = f"{self.random.choice(CRASH_POINTS)}:{self.random.randint(1, 4)}"
        self.learner.start({"PENSTOCK_CRASH_AT": place})

    async def _kill_redis(self) -> None:
        self.redis.kill()
        await asyncio.sleep(self.random.uniform(0, 0.5))
        await self._start_redis()

    async def _cut_redis(self) -> None:
        self.redis.sample()
        self.redis.kill()
        self.report.cut_bytes += self.redis.cut_tail()
        await asyncio.sleep(self.random.uniform(0, 0.5))
        await self._start_redis()

    async def _raise_a_zombie(self) -> None:
        """Suspend a working learner, let a second one take over, and wake the first, which must find itself fenced."""
        if self.learner.is_expected_to_die:
            self.learner.kill()  # The learner waits at a crash point and would die before it finds itself fenced.
        while True:
            await self._learner_took_over()
            zombie = self.learner
            zombie.send(signal.SIGSTOP)
            await asyncio.sleep(0.05)
            if zombie.exit_code is None:
                break
        self.learner = self._learner(f"learner-{len(self.children) - 2}")
        self.children.append(self.learner)
        self.learner.start()
        await self._learner_took_over()
        await asyncio.sleep(self.random.uniform(0, 1))
        zombie.send(signal.SIGCONT)
        await _until(lambda: zombie.exit_code is not None)
        assert zombie.exit_code == FENCED, f"the zombie ended with {zombie.exit_code}:\n{zombie.last_words()}"

    # ── waiting ──

    async def _start_redis(self) -> None:
        await asyncio.to_thread(self.redis.start)
        await self._stat()
        self.redis_starts += 1

    async def _stat(self) -> QueueStat:
        return await self._until_redis_answers(self.queue.stat)

    async def _until_redis_answers(self, call: Callable[[], Awaitable[T]]) -> T:
        async with asyncio.timeout(STALL_S):
            while True:
                try:
                    return await call()
                except Unavailable:
                    await asyncio.sleep(0.05)

    async def _learner_took_over(self) -> None:
        """Wait until the most recently started learner acts under its own term."""
        await _until(lambda: TOOK_OVER in self.learner.log_since_start() and self.learner.exit_code is None)

    # ── the end ──

    async def _drain(self) -> None:
        """Wait until a checkpoint covers every prompt and the queue is empty. Then stop the learner."""
        async with asyncio.timeout(STALL_S + self.plan.num_groups):
            while True:
                found = self._newest()
                stat = await self._stat()
                is_empty = stat.pending_prompts + stat.in_flight + stat.queued == 0
                if found and is_empty and sum(found.times.values()) >= self.plan.num_groups:
                    break
                await asyncio.sleep(0.1)

    def _newest(self) -> Folded | None:
        with suppress(IndexError, FileNotFoundError, PenstockError):
            return Folded.load(self._checkpoints()[0])
        return None

    def _checkpoints(self) -> list[Path]:
        return CheckpointStore(Path(self.settings.checkpoints), 2).newest_first()

    async def _take_stock(self) -> None:
        report = self.report
        path = self._checkpoints()[0]
        folded = Folded.load(path)
        report.times, report.content, report.ledger = folded.times, folded.content, read_state(path).ledger
        report.lost_replies = self.proxy.num_lost
        report.stat = await self._stat()
        prefix = self.queue.keys.prefix
        names = {key.decode().removeprefix(prefix) async for key in self.client.scan_iter(count=1000)}
        submissions = {name for name in names if name.startswith("idempotency:")}
        report.num_submissions = len(submissions)
        report.keys = names - submissions
        manifests = await self.client.hgetall(self.queue.keys.manifests)
        report.open_manifests = {int(step): [int(word) for word in ids.split()] for step, ids in manifests.items()}


async def _until(holds: Callable[[], bool], timeout_s: float | None = STALL_S) -> None:
    """Wait for a condition outside of this process, for which there is no event to await."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
