"""Finds out that a run's dataset has ended, so that the learner makes its last step and finishes."""

from __future__ import annotations

from penstock.config.dataset import DatasetConfig
from penstock.errors import InvalidInput
from penstock.feed.run_end import data_has_ended
from penstock.replay.contract import GroupConsumer

REMAINDER = "remainder"
"""Reason of groups that are dropped because they do not fill the last batch (`dataset.last_batch: drop`)."""


class DataEnd:
    """The end of the dataset of one run: the feed has submitted all epochs, and every prompt has left the queue."""

    def __init__(self, queue: GroupConsumer, config: DatasetConfig) -> None:
        self.queue = queue
        self.config = config

    @property
    def drops_remainder(self) -> bool:
        return self.config.last_batch == "drop"

    async def is_reached(self) -> bool:
        """Whether no more groups will come. Groups that the learner has taken do not count."""
        return await data_has_ended(self.queue, self.config)

    async def raise_if_nothing_was_trained(self, step: int) -> None:
        """Raise InvalidInput if the data ended before the first step: such a run has not gone well."""
        if step > 0:
            return
        stat = await self.queue.stat()
        what = f"{stat.dead_lettered} prompts were dead-lettered and {stat.discarded} groups were dropped"
        advice = "correct the dataset, the model's chat template or rollout.prompt, and start a new run"
        if not stat.inserted:
            what = f"all {stat.dead_lettered} prompts were dead-lettered, and there is nothing to train on"
        if (await self.queue.expired_reasons()).get(REMAINDER):
            what = "it has fewer prompts than replay.groups_per_step"
            advice = "set dataset.last_batch to train, or lower replay.groups_per_step"
        raise InvalidInput(f"dataset {self.config.name!r}", f"it ended before the first step: {what}; {advice}")
