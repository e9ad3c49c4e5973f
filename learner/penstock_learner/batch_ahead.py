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
    """Two tasks: `reading`, and `forwards`, which begins when it has ended. `end` when the batch is not wanted."""

    def __init__(self, reading: asyncio.Task[Batch], forwards: asyncio.Task[Computed]) -> None:
        self.reading = reading
        self.forwards = forwards

    @classmethod
    def begin(cls, reader: BatchReader, training: TrainingStep, step: int, version: int) -> BatchAhead:
        reading = asyncio.create_task(reader.read(step, version))

        async def forwards() -> Computed:
            return await training.frozen_forwards((await reading).groups)

        return cls(reading, asyncio.create_task(forwards()))

    async def end(self) -> None:
        for task in (self.forwards, self.reading):
            await end_task(task)
