"""A learner rewinds to a checkpoint and is killed at every point: nothing is lost or trained twice in the weights.

The learner is the one of the chaos runs. It has no model: its weights count how often each prompt was trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.codec import decode_prompt, encode_group
from penstock.config.service import RedisConfig
from penstock.errors import ConfigError
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease, QueueStat
from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient, connect
from penstock_learner.checkpoints import CheckpointStore, read_state
from penstock_learner.crash_points import NAMES
from support.chaos.learner_process import Folded
from support.chaos.workload import RUN, Settings, make_numbered_group, make_payload
from support.forked_process import ForkedProcess
from support.redis_server import RedisProcess

KILLED = -9
NUM_PROMPTS, GROUPS_PER_STEP, KEEP = 48, 2, 2
DEADLINE_S = 120


class Run:
    """A run of the learner without a model. The test is the rollout server."""

    def __init__(self, folder: Path, redis: RedisProcess) -> None:
        self.folder = folder
        self.log = folder / "learner.log"
        self.store = CheckpointStore(folder / "checkpoints", KEEP)
        self.redis = RedisConfig(url=redis.url)
        replay: dict[str, object] = {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 1}
        self.settings = Settings(redis.url, str(self.store.folder), replay, step_s=(0, 0), batch_timeout_s=DEADLINE_S)
        self.clients: list[RedisClient] = []

    def queue(self) -> RedisReplayQueue:
        self.clients.append(connect(self.redis))
        return RedisReplayQueue(self.clients[-1], RUN, self.settings.replay_config)

    async def prepare(self) -> None:
        queue = self.queue()
        async for key in queue.client.scan_iter(f"{RunKeys(RUN).prefix}*"):
            await queue.client.delete(key)
        payloads = [make_payload(number) for number in range(NUM_PROMPTS)]
        assert (await queue.feed("train", "f", 0, payloads, [0] * NUM_PROMPTS)).position == NUM_PROMPTS

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


def group_of(lease: Lease) -> bytes:
    number = decode_prompt(lease.payload).token_ids[0]
    return encode_group(make_numbered_group(number, lease, "r0"))


@pytest.fixture
def run(tmp_path: Path, redis_process: RedisProcess) -> Iterator[Run]:
    run = Run(tmp_path, redis_process)
    run.do(run.prepare())
    code, output = run.go(until_trained=NUM_PROMPTS // 2)
    assert code == 0, output
    yield run


def older_checkpoint(run: Run) -> Path:
    newest, older = run.store.newest_first()
    assert read_state(older).step < read_state(newest).step
    return older


def check_all_trained_once(run: Run) -> None:
    newest, _ = run.store.newest_first()
    assert Folded.load(newest).times == Counter(range(NUM_PROMPTS)), "nothing is lost or doubled in the weights"
    stat = run.stat()
    assert (stat.trained, stat.pending_prompts, stat.queued, stat.in_flight) == (NUM_PROMPTS, 0, 0, 0)


@pytest.mark.fault_row(
    "checkpoints", "killed just after a rewind", how="a crash point",
    must="the next learner goes on from the older checkpoint",
)  # fmt: skip
def test_a_learner_killed_just_after_it_rewound_is_continued(run: Run) -> None:
    check_crash(run, "after_rewind")


@pytest.mark.fault_row(
    "checkpoints", "rewind, killed at {crash_at}", how="a named checkpoint, and a crash point",
    must="no group is lost or trained twice",
)  # fmt: skip
@pytest.mark.long
@pytest.mark.parametrize("crash_at", ["before_rewind", *NAMES])
def test_a_learner_that_rewinds_and_is_killed_is_continued(crash_at: str, run: Run) -> None:
    check_crash(run, crash_at)


def check_crash(run: Run, crash_at: str) -> None:
    older = older_checkpoint(run)
    before = run.stat()
    code, output = run.go(crash_at, rewind_to=str(older))
    assert code == KILLED, output
    if crash_at.endswith("rewind"):
        with pytest.raises(ConfigError, match="only Redis knows whether it did"):
            run.store.of_the_run()
    if crash_at == "before_rewind":
        assert run.stat().trained == before.trained
        code, output = run.go(rewind_to=str(older))
    else:
        code, output = run.go()  # a supervisor may start it again without the option
        assert "rewound to" not in output
    assert code == 0, output
    assert {read_state(path).resumed_from for path in run.store.newest_first()} == {str(older)}
    assert run.store.of_the_run() == run.store.newest_first()
    check_all_trained_once(run)


@pytest.mark.fault_row(
    "checkpoints", "rewind to an older checkpoint", how="it is named on purpose",
    must="it happens once, and only when asked",
)  # fmt: skip
def test_a_learner_rewinds_only_when_asked_and_only_once(run: Run) -> None:
    older = older_checkpoint(run)
    newest, _ = run.store.newest_first()
    newest.rename(run.folder / newest.name)
    learner = run.start()
    code, output = learner.wait(DEADLINE_S), run.log.read_text()
    step, committed = read_state(older).step, read_state(run.folder / newest.name).step
    assert code == 1 and f"is at step {step}, but step {committed} is committed" in output, output
    term = run.stat().term
    (run.folder / newest.name).rename(newest)

    code, output = run.go(rewind_to=str(older), until_trained=NUM_PROMPTS - 8)
    assert code == 0 and "rewound to" in output, output
    assert run.stat().term == term + 1
    code, output = run.go(rewind_to=str(older))
    assert code == 0 and "rewound to" not in output, output
    check_all_trained_once(run)
