"""A run of the learner without a model, whose weights count how often each prompt was trained. The caller is the
rollout server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from penstock.codec import decode_prompt, encode_group
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease, QueueStat
from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient, connect
from penstock_learner.checkpoints import CheckpointStore
from support.chaos.learner_process import Folded
from support.chaos.workload import RUN, Settings, make_numbered_group, make_payload
from support.forked_process import ForkedProcess
from support.redis_server import RedisProcess

NUM_PROMPTS, GROUPS_PER_STEP, KEEP = 48, 2, 2
DEADLINE_S = 120


class CountedRun:
    def __init__(self, folder: Path, redis: RedisProcess) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.log = folder / "learner.log"
        self.store = CheckpointStore(folder / "checkpoints", KEEP)
        self.redis = RedisConfig(url=redis.url)
        replay: dict[str, object] = {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 1}
        self.settings = Settings(
            redis.url,
            str(self.store.folder),
            replay,
            step_s=(0, 0),
            batch_timeout_s=DEADLINE_S,
            starved_s=DEADLINE_S / 4,
        )
        self.clients: list[RedisClient] = []

    def queue(self) -> RedisReplayQueue:
        self.clients.append(connect(self.redis))
        return RedisReplayQueue(self.clients[-1], RUN, self.settings.replay_config)

    async def prepare(self) -> None:
        queue = self.queue()
        async for key in queue.client.scan_iter(f"{RunKeys(RUN).prefix}*"):
            await queue.client.delete(key)
        await self.feed(0, NUM_PROMPTS)

    async def feed(self, first: int, end: int) -> None:
        payloads = [make_payload(number) for number in range(first, end)]
        assert (await self.queue().feed("train", "f", first, payloads, [0] * len(payloads))).position == end

    def start(self, crash_at: str = "", rewind_to: str = "") -> ForkedProcess:
        path = self.folder / "settings.json"
        replace(self.settings, rewind_to=rewind_to).save(path)
        self.log.write_text("")
        arguments = ["--settings", str(path)]
        return ForkedProcess("support.chaos.learner_process", arguments, self.log, {"PENSTOCK_CRASH_AT": crash_at})

    async def serve(self, learner: ForkedProcess, until_trained: int = NUM_PROMPTS) -> QueueStat:
        """Answer prompts until the learner ends, or has committed `until_trained`; then stop it."""
        queue, deadline = self.queue(), time.monotonic() + DEADLINE_S
        while learner.poll() is None and (await queue.stat()).trained < until_trained:
            assert time.monotonic() < deadline, await queue.stat()
            for lease in await queue.lease("r0", 4):
                await queue.append(lease, group_of(lease), (await queue.stat()).policy_version)
            await asyncio.sleep(0.01)
        if learner.poll() is None:
            learner.terminate()
        await asyncio.to_thread(learner.wait, DEADLINE_S)
        stat = await queue.stat()
        assert stat.conservation_error == 0, stat
        return stat

    def go(self, crash_at: str = "", rewind_to: str = "", until_trained: int = NUM_PROMPTS) -> tuple[int, str]:
        """Run a learner. Returns its exit code and what it logged."""
        learner = self.start(crash_at, rewind_to)
        try:
            self.do(self.serve(learner, until_trained))
            return learner.wait(0), self.log.read_text()
        finally:
            learner.kill()
            learner.wait(DEADLINE_S)

    def do(self, call: object) -> object:
        async def with_clients() -> object:
            try:
                return await call  # type: ignore[misc]
            finally:
                for client in self.clients:
                    await client.aclose()
                self.clients.clear()

        return asyncio.run(with_clients())

    def stat(self) -> QueueStat:
        stat = self.do(self.queue().stat())
        assert isinstance(stat, QueueStat)
        return stat

    def check_all_trained_once(self) -> None:
        newest, _ = self.store.newest_first()
        assert Folded.load(newest).times == Counter(range(NUM_PROMPTS)), "nothing is lost or doubled in the weights"
        stat = self.stat()
        assert (stat.trained, stat.pending_prompts, stat.queued, stat.in_flight) == (NUM_PROMPTS, 0, 0, 0)


def group_of(lease: Lease) -> bytes:
    number = decode_prompt(lease.payload).token_ids[0]
    return encode_group(make_numbered_group(number, lease, "r0"))
