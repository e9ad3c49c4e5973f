"""The plan of a run and its end, as its config and its dataset give them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.dataset import DatasetConfig
from penstock.config.run import RunConfig
from penstock.replay.queue import PromptIntake, QueueCalls


async def data_has_ended(queue: QueueCalls, config: DatasetConfig) -> bool:
    """Whether all epochs were submitted, and every prompt has left the queue or is with the learner."""
    if config.file is None or config.epochs == 0:
        return False
    # The position is read first: what was submitted by then is in the counts that are read after it.
    feed = (await queue.feeds()).get(config.name)
    if feed is None or not feed.has_ended(config.epochs):
        return False
    stat = await queue.stat()
    return stat.pending_prompts == 0 and stat.in_flight == 0 and stat.queued == stat.delivered


class RunEnd:
    """Tells whether a run has finished. A run that was finished and is started again with more steps has not."""

    def __init__(self, queue: PromptIntake, config: RunConfig) -> None:
        self.queue = queue
        self.config = config

    async def is_reached(self) -> bool:
        """Whether the learner has finished at the current step, and the config asks for no more."""
        stat = await self.queue.stat()
        if stat.finished_step != stat.step:
            return False
        is_last = self.config.dataset.validation.only or 0 < self.config.learner.num_steps <= stat.step
        return is_last or await data_has_ended(self.queue, self.config.dataset)


@dataclass(frozen=True)
class EarlierWork:
    """What a run had before a dataset was fed to it."""

    step: int = 0
    """Steps that were made."""
    num_prompts: int = 0
    """Prompts of other datasets and of clients that are not trained yet."""


async def earlier_work(queue: QueueCalls, config: RunConfig) -> EarlierWork:
    """What the run had before the dataset of the config. Once its prompts are submitted, it counts as the only one."""
    feed = (await queue.feeds()).get(config.dataset.name)
    if feed is not None and feed.position > 0:
        return EarlierWork()
    stat = await queue.stat()
    num_done = stat.num_trained(config.replay.groups_per_step) - stat.trained
    return EarlierWork(stat.step, stat.pending_prompts + stat.in_flight + stat.queued - num_done)


def plan_line(config: RunConfig, epoch_prompts: int, earlier: EarlierWork = EarlierWork()) -> str:  # noqa: B008  (it is frozen)
    """What the run will do, in one line: its steps, as `learner.num_steps` and the epochs of the dataset allow."""
    dataset, size = config.dataset, config.replay.groups_per_step
    if dataset.validation.only:
        return "plan: validate and finish, without training (dataset.validation.only)"
    last_step = config.learner.num_steps
    wanted = max(0, last_step - earlier.step)
    if last_step and not wanted:
        return f"plan: no step, because the run is at step {earlier.step} of learner.num_steps {last_step}"
    named = f"more steps of {size} prompts" if earlier.step else f"steps of {size} prompts"
    queued = f" and {earlier.num_prompts} prompts that are queued already" if earlier.num_prompts else ""
    epochs = "1 epoch" if dataset.epochs == 1 else f"{dataset.epochs} epochs"
    data = f"{epochs} of {epoch_prompts} prompts{queued}"
    if dataset.epochs == 0:
        data = f"the dataset of {epoch_prompts} prompts, repeated without end (dataset.epochs){queued and ','}{queued}"
        return f"plan: {wanted} {named} from {data}" if wanted else f"plan: train until stopped on {data}"
    whole, rest = divmod(dataset.epochs * epoch_prompts + earlier.num_prompts, size)
    steps = whole + (rest > 0 and dataset.last_batch == "train")
    if 0 < wanted < steps:
        return f"plan: {wanted} {named} (learner.num_steps), although {data} are enough for {steps} steps"
    last = ""
    if rest:
        last = f"; the last step has {rest}" if dataset.last_batch == "train" else f"; the last {rest} are dropped"
    early = f", which end before learner.num_steps {last_step}" if wanted > steps else ""
    return f"plan: {steps} {named} from {data}{early}{last}"
