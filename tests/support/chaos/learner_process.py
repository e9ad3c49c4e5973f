"""A learner without a model: the real reader, ledger, checkpoints and crash points, in the order of the controller.

Training folds a batch into `Folded`, which counts how often each prompt was trained. Checkpoints hold it in place of
weights, so a prompt that is lost or trained twice across any number of crashes shows in the last checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from collections import Counter
from pathlib import Path

from penstock.config.algorithms import KLConfig
from penstock.config.learner import CheckpointConfig, LearnerConfig
from penstock.config.service import RedisConfig
from penstock.errors import DeadlineExceeded, Fenced, Unavailable
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock_learner.checkpoints import CheckpointStore
from penstock_learner.crash_points import crash_point
from penstock_learner.loop.batches import Batch, BatchReader
from penstock_learner.loop.take_over import choose_checkpoint, take_over
from penstock_learner.term import TrainerState
from support.chaos.workload import (
    FENCED,
    RUN,
    TOO_LATE,
    UNAVAILABLE,
    Settings,
    digest_of,
    number_of,
    while_driven,
)

logger = logging.getLogger(__name__)
WEIGHTS_FILE = "folded.json"
KEEP = 2
TOOK_OVER = "took over"
"""Log line of a learner that acts under its own term."""


class Folded:
    """The weights of this learner: how often each prompt was trained, and a checksum of the trained groups."""

    def __init__(self, times: dict[int, int], content: int) -> None:
        self.times = Counter(times)
        self.content = content

    def fold(self, batch: Batch) -> None:
        self.times.update(number_of(group) for group in batch.groups)
        self.content = (self.content + sum(map(digest_of, batch.groups))) % 2**64

    def save(self, folder: Path) -> None:
        (folder / WEIGHTS_FILE).write_text(json.dumps({"times": self.times, "content": self.content}))

    @classmethod
    def load(cls, folder: Path) -> Folded:
        fields = json.loads((folder / WEIGHTS_FILE).read_text())
        return cls({int(number): count for number, count in fields["times"].items()}, fields["content"])


class ChaosLearner:
    """The LearnerController without its model. All calls to the queue and to checkpoints come in the same order."""

    def __init__(self, settings: Settings, queue: RedisReplayQueue) -> None:
        self.settings = settings
        self.queue = queue
        self.checkpoints = CheckpointStore(Path(settings.checkpoints), KEEP)
        self.stopping = asyncio.Event()
        self.random = random.Random()

    async def run(self) -> None:
        self.folded = Folded({}, 0)
        resuming = CheckpointConfig(resume=self.settings.rewind_to or "auto", rewind=bool(self.settings.rewind_to))
        loss_window_s = self.settings.replay_config.loss_window_s
        chosen = await choose_checkpoint(self.queue, self.checkpoints, resuming)
        term = await take_over(self.queue, self.checkpoints, resuming, chosen, self._load, loss_window_s, KLConfig())
        self.resumed_from = term.resumed_from
        self.term, self.store_id = term.number, term.store_id
        logger.warning("%s: term %d from step %d", TOOK_OVER, self.term, term.step)
        self.ledger = term.ledger
        self.uncommitted: list[int] = []
        learner = LearnerConfig(batch_timeout_s=self.settings.batch_timeout_s)
        reader = BatchReader(self.queue, self.settings.replay_config, learner, term)
        is_new = term.step == 0 and (await self.queue.stat()).policy_version == 0
        version = 0 if is_new else await self.queue.allocate_version(term.policy_version + 1)
        await self.queue.publish(version, term.step, b"policy")
        await self._train(reader, term.step, version)

    async def _load(self, checkpoint: Path) -> None:
        self.folded = Folded.load(checkpoint)

    async def _train(self, reader: BatchReader, step: int, version: int) -> None:
        """Train for ever, because a service has no last step. Groups that are already in the ledger are taken and
        dropped."""
        publishing: asyncio.Task[None] | None = None
        reading = asyncio.create_task(reader.read(step + 1, version))
        try:
            while True:
                batch = await self._batch_or_stop(reading, step, version)
                if batch is None:
                    break
                step += 1
                crash_point("after_read")
                reading = asyncio.create_task(reader.read(step + 1, version + 1))
                await asyncio.sleep(self.random.uniform(*self.settings.step_s))
                self.folded.fold(batch)
                self.ledger.add(batch.prompt_ids)
                self.uncommitted += batch.prompt_ids
                crash_point("mid_step")
                if publishing is not None:
                    await publishing
                version = await self.queue.allocate_version(version + 1)
                publishing = asyncio.create_task(self.queue.publish(version, step, b"policy"))
                if step % self.settings.checkpoint_every == 0:
                    await self._checkpoint(step, version)
            if publishing is not None:
                await publishing
            await self._checkpoint(step, version)
        finally:
            for task in (publishing, reading):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    async def _batch_or_stop(self, reading: asyncio.Task[Batch], trained_step: int, version: int) -> Batch | None:
        batch = await self._or_stop(reading, self.settings.starved_s)
        if batch is None and not self.stopping.is_set():
            await self._checkpoint(trained_step, version)
            batch = await self._or_stop(reading, None)
        return batch

    async def _or_stop(self, reading: asyncio.Task[Batch], timeout_s: float | None) -> Batch | None:
        stop = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({reading, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return reading.result() if reading.done() else None

    async def _checkpoint(self, step: int, version: int) -> None:
        if not self.uncommitted:
            return
        partial = self.checkpoints.partial_folder(step, self.term)
        with self.checkpoints.writing(partial):
            self.folded.save(partial)
        crash_point("before_flush")
        state = TrainerState(
            step, version, self.term, self.ledger.ranges, store_id=self.store_id, resumed_from=self.resumed_from
        )
        self.checkpoints.finish(partial, state)
        self.ledger.mark_durable(self.uncommitted)
        crash_point("after_flush")
        await self.queue.commit(step, self.uncommitted, self.checkpoints.oldest_step())
        crash_point("after_commit")
        self.uncommitted = []


async def learn(settings: Settings) -> None:
    client = connect(
        RedisConfig(url=settings.redis_url, timeout_s=settings.redis_timeout_s, retry_s=settings.redis_retry_s),
        patient=True,
    )
    learner = ChaosLearner(settings, RedisReplayQueue(client, RUN, settings.replay_config))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, learner.stopping.set)
    running, driven = asyncio.create_task(learner.run()), asyncio.create_task(while_driven())
    await asyncio.wait({running, driven}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    driven.cancel()
    await client.aclose()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(learn(Settings.load(arguments.settings)))
    except Fenced as error:
        logger.warning("%s", error)
        return FENCED
    except Unavailable as error:
        logger.warning("%s", error)
        return UNAVAILABLE
    except DeadlineExceeded as error:
        logger.warning("%s", error)
        return TOO_LATE
    return 0


if __name__ == "__main__":
    sys.exit(main())
