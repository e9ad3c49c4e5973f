"""A run is copied while it trains, and the copy continues elsewhere: nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.chaos.counted_run import DEADLINE_S, NUM_PROMPTS, CountedRun
from support.processes import DemoProcess, until
from support.redis_server import RedisProcess

NUM_BEFORE = NUM_PROMPTS // 3
NUM_AFTER = 8
"""Prompts that only the restored run gets, so that the first one cannot end before it is copied."""


class Backup:
    """A run that trains, its copy, and a place to restore it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.redis = folder, RedisProcess(folder / "redis")
        self.redis.start()
        self.restored_redis = RedisProcess(folder / "restored-redis")
        self.run = CountedRun(folder / "run", self.redis)

    def copy(self, part: str) -> None:
        """Copy `run/checkpoints`, or the folder of Redis' log, over an earlier copy."""
        target = self.folder / "copy" / part
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / part, target, ignore=shutil.ignore_patterns("*.partial"))

    async def train(self, num_trained: int) -> None:
        """Train until so many are committed; then stop the learner."""
        learner = self.run.start()
        await self.run.serve(learner, num_trained)
        assert learner.wait(DEADLINE_S) == 0, self.run.log.read_text()

    def restore(self) -> CountedRun:
        shutil.copytree(self.folder / "copy/run/checkpoints", self.folder / "restored/checkpoints")
        shutil.copytree(
            self.folder / "copy/redis", self.folder / "restored-redis", dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("redis.conf", "password"),
        )  # fmt: skip
        self.redis.kill()
        self.restored_redis.start()
        restored = CountedRun(self.folder / "restored", self.restored_redis)
        # The learner writes its last checkpoint once no group has come for this time.
        restored.settings = replace(restored.settings, starved_s=5)
        return restored

    def newest_step(self, checkpoints: str) -> int:
        # By their names: the learner may remove one before it could be read.
        return max(int(path.name.split("-")[-1]) for path in (self.folder / checkpoints).glob("term-*-step-*[0-9]"))


@pytest.fixture
def backup(tmp_path: Path) -> Iterator[Backup]:
    backup = Backup(tmp_path)
    yield backup
    backup.redis.kill()
    backup.restored_redis.kill()


async def copied_while_it_trains(backup: Backup) -> None:
    """Copy checkpoints first and Redis last. If a checkpoint was made in between, copy again."""
    learner = backup.run.start()
    serving, queue = asyncio.create_task(backup.run.serve(learner)), backup.run.queue()
    while not serving.done() and (await queue.stat()).trained < NUM_BEFORE:
        await asyncio.sleep(0.01)
    while not serving.done():
        try:
            await asyncio.to_thread(backup.copy, "run/checkpoints")
        except shutil.Error:  # a checkpoint was removed meanwhile
            continue
        await asyncio.to_thread(backup.copy, "redis")
        if backup.newest_step("copy/run/checkpoints") == backup.newest_step("run/checkpoints"):
            break
    learner.kill()
    await serving


def test_a_copy_of_checkpoints_first_and_redis_last_continues(backup: Backup) -> None:
    backup.run.do(backup.run.feed(0, NUM_PROMPTS - NUM_AFTER))
    backup.run.do(copied_while_it_trains(backup))
    restored = backup.restore()
    restored.do(restored.feed(NUM_PROMPTS - NUM_AFTER, NUM_PROMPTS))
    code, output = restored.go()
    assert code == 0, output
    restored.check_all_trained_once()


def test_a_commit_between_the_copies_is_refused_until_the_run_is_rewound(backup: Backup) -> None:
    backup.run.do(backup.run.feed(0, NUM_BEFORE))
    backup.run.do(backup.train(NUM_BEFORE))
    backup.copy("run/checkpoints")
    backup.run.do(backup.run.feed(NUM_BEFORE, NUM_BEFORE + 4))
    backup.run.do(backup.train(NUM_BEFORE + 4))
    backup.copy("redis")
    restored = backup.restore()
    code, output = restored.go()
    assert code == 1 and "set learner.checkpoint.resume to" in output and "to rewind and train them again" in output
    restored.do(restored.feed(NUM_BEFORE + 4, NUM_PROMPTS))
    code, output = restored.go(rewind_to=str(restored.store.newest_first()[0]))
    assert code == 0 and "rewound to" in output, output
    restored.check_all_trained_once()


@pytest.mark.parametrize("num_known", [NUM_PROMPTS, NUM_BEFORE])
def test_a_redis_older_than_the_checkpoint_is_refused_unless_it_knows_every_prompt(
    backup: Backup, num_known: int
) -> None:
    backup.run.do(backup.run.feed(0, num_known))
    backup.run.do(backup.train(NUM_BEFORE - 4))
    backup.copy("redis")
    if num_known < NUM_PROMPTS:
        backup.run.do(backup.run.feed(num_known, NUM_PROMPTS))
    backup.run.do(backup.train(NUM_BEFORE + 8))
    backup.copy("run/checkpoints")
    restored = backup.restore()
    code, output = restored.go()
    if num_known == NUM_PROMPTS:
        assert code == 0, output
        restored.check_all_trained_once()
    else:
        assert code == 1 and f"but the newest prompt of this Redis is {num_known}: it is older" in output, output
        assert restored.stat().step <= NUM_BEFORE, "nothing was changed"


@pytest.mark.long
@pytest.mark.timeout(700)
def test_the_copied_folder_of_a_run_continues_elsewhere(tmp_path: Path) -> None:
    words = (
        "--rollout.engine.name", "torch", "--learner.policy.num_ranks", "1", "--replay.groups_per_step", "8",
        "--learner.algorithm.kl.placement", "none", "--learner.num_steps", "16",
        "--learner.checkpoint.every_steps", "3",
    )  # fmt: skip
    copied = tmp_path / "elsewhere" / "t"
    first = DemoProcess(tmp_path, *words)
    try:
        first.wait_for_step(4)
        until(lambda: list(first.folder.glob("checkpoints/term-*-step-00000003")), "a checkpoint")
        shutil.copytree(first.folder, copied, ignore=shutil.ignore_patterns("redis", "lock"))
        shutil.copytree(first.folder / "redis", copied / "redis")
    finally:
        first.end()
    second = DemoProcess(copied.parent, *words)
    try:
        assert second.wait() == 0, second.text()
        assert "continuing from" in (second.folder / "logs" / "learner.log").read_text()
        summary = json.loads((second.folder / "summary.json").read_text())
        assert (summary["steps"], summary["groups_trained"], summary["conservation_error"]) == (16, 16 * 8, 0)
    finally:
        second.end()
