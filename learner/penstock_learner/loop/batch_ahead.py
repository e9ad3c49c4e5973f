"""A step's batch on its way, beside the step before it: read, then passed through the roles whose weights never change.

Reference log-probs and the reward model's scores depend on the groups alone, so they need not wait for the update
before them; log-probs of the policy and values of the critic do. Which groups are wanted depends on the version that
trains them, and on what was rolled back: `again` asks anew.
"""

from __future__ import annotations

import asyncio

from penstock.cancellation import end_task
from penstock_learner.loop.batch_reader import Batch, BatchReader
from penstock_learner.loop.training_step import Computed, TrainingStep


class BatchAhead:
    """Two tasks: `reading`, and `forwards`, which begins when it has ended. Set `wanted` when training waits for it,
    which is when its deadline begins; `end` what will not be trained."""

    def __init__(
        self,
        reading: asyncio.Task[Batch],
        forwards: asyncio.Task[Computed],
        wanted: asyncio.Event,
        before: BatchAhead | None = None,
    ) -> None:
        self.reading = reading
        self.forwards = forwards
        self.wanted = wanted
        self.before = before
        """What this one goes on from."""

    @classmethod
    def begin(cls, reader: BatchReader, training: TrainingStep, step: int, version: int) -> BatchAhead:
        wanted = asyncio.Event()
        reading = asyncio.create_task(reader.read(step, version, wanted))

        async def forwards() -> Computed:
            return await training.frozen_forwards((await reading).groups)

        return cls(reading, asyncio.create_task(forwards()), wanted)

    def again(self, reader: BatchReader, training: TrainingStep, version: int) -> BatchAhead:
        """The same batch for weights that were rolled back and are `version` now: others in the place of groups that
        are not wanted any more. What was computed is kept if all are."""

        async def read_again() -> Batch:
            return await reader.read_again(await self.reading, version, self.wanted)

        reading = asyncio.create_task(read_again())

        async def forwards() -> Computed:
            batch = await reading
            # Not broken off although it may be for nothing: it may be restarting a role.
            computed = await self.forwards
            return computed if batch is self.reading.result() else await training.frozen_forwards(batch.groups)

        return BatchAhead(reading, asyncio.create_task(forwards()), self.wanted, before=self)

    async def end(self) -> None:
        for task in (self.forwards, self.reading):
            await end_task(task)
        if self.before is not None:
            await self.before.end()
