"""The batch of the next step, prepared while the current step trains: read, then passed through the frozen roles.

Reference log-probs and the reward model's scores depend on the groups alone, so they can be computed ahead. The
policy's log-probs and the critic's values depend on the update before them, and cannot.

A roll back can make a group that was read ahead too old to train. `after_roll_back` then checks the batch again.
`without` replaces groups whose server turned out to be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from penstock.cancellation import end_task
from penstock_learner.batches.sequence_batch import SequenceBatch, no_sequences
from penstock_learner.loop.batch_reader import Batch, BatchReader
from penstock_learner.loop.training_step import TrainingStep


class BatchAhead:
    """Holds two tasks: `reading`, and `forwards`, which starts when the batch is read.

    Set `wanted` when training waits for the batch; its deadline starts then. Call `end` on a batch that will not be
    trained."""

    def __init__(
        self,
        reading: asyncio.Task[Batch],
        forwards: asyncio.Task[SequenceBatch],
        wanted: asyncio.Event,
        replaced: BatchAhead | None = None,
    ) -> None:
        self.reading = reading
        self.forwards = forwards
        self.wanted = wanted
        self.replaced = replaced
        """The batch that this one was made from, whose tasks it awaits."""

    @classmethod
    def begin(cls, reader: BatchReader, training: TrainingStep, step: int, version: int) -> BatchAhead:
        """Start to read the batch of `step`, which weights of `version` will train."""
        wanted = asyncio.Event()
        reading = asyncio.create_task(reader.read(step, version, wanted))

        async def forwards() -> SequenceBatch:
            return await _ahead(training, await reading)

        return cls(reading, asyncio.create_task(forwards()), wanted)

    def after_roll_back(self, reader: BatchReader, training: TrainingStep, version: int) -> BatchAhead:
        """The same batch for rolled-back weights, which are now called `version`.

        Groups that may no longer be trained are replaced. If there are none, the computed forwards are kept."""

        async def replace_outdated() -> Batch:
            return await reader.replace_outdated(await self.reading, version, self.wanted)

        return self._again(training, replace_outdated())

    def without(
        self, reader: BatchReader, training: TrainingStep, prompt_ids: Collection[int], version: int
    ) -> BatchAhead:
        """The same batch with other groups in place of these, which come from servers in quarantine."""

        async def replace() -> Batch:
            return await reader.replace(await self.reading, prompt_ids, "quarantined", version, self.wanted)

        return self._again(training, replace())

    def _again(self, training: TrainingStep, read: Coroutine[Any, Any, Batch]) -> BatchAhead:
        """A batch that is made from this one. The computed forwards are kept if it has the same groups."""
        reading = asyncio.create_task(read)

        async def forwards() -> SequenceBatch:
            batch = await reading
            # Awaited even if its result is not needed, and never cancelled: it may be restarting a role.
            computed = await self.forwards
            return computed if batch is self.reading.result() else await _ahead(training, batch)

        return BatchAhead(reading, asyncio.create_task(forwards()), self.wanted, replaced=self)

    async def end(self) -> None:
        """Cancel the tasks, and those of the batch that this one replaced."""
        for task in (self.forwards, self.reading):
            await end_task(task)
        if self.replaced is not None:
            await self.replaced.end()


async def _ahead(training: TrainingStep, batch: Batch) -> SequenceBatch:
    """What is computed ahead. A batch without groups is never trained: the data has ended."""
    return await training.ahead(batch.groups) if batch.groups else no_sequences()
