"""A step's batch on its way, beside the step before it: read, then passed through the roles whose weights never change.

Reference log-probs and the reward model's scores depend on the groups alone, so they need not wait for the update
before them; log-probs of the policy and values of the critic do.
"""

from __future__ import annotations

import asyncio

from penstock.cancellation import end_task
from penstock_learner.batch_reader import Batch, BatchReader
from penstock_learner.training_step import Computed, TrainingStep


class BatchAhead:
    """Two tasks: `reading`, and `forwards`, which begins when it has ended. Set `wanted` when training waits for it,
    which is when its deadline begins; `end` what will not be trained."""

    def __init__(self, reading: asyncio.Task[Batch], forwards: asyncio.Task[Computed], wanted: asyncio.Event) -> None:
        self.reading = reading
        self.forwards = forwards
        self.wanted = wanted

    @classmethod
    def begin(cls, reader: BatchReader, training: TrainingStep, step: int, version: int) -> BatchAhead:
        wanted = asyncio.Event()
        reading = asyncio.create_task(reader.read(step, version, wanted))

        async def forwards() -> Computed:
            return await training.frozen_forwards((await reading).groups)

        return cls(reading, asyncio.create_task(forwards()), wanted)

    def forwards_of(self, batch: Batch) -> asyncio.Task[Computed] | None:
        """Of the batch, if it is the one that was read: groups of it may have been replaced since."""
        return self.forwards if batch is self.reading.result() else None

    async def end(self) -> None:
        for task in (self.forwards, self.reading):
            await end_task(task)
