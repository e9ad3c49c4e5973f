"""Pauses the run when the reward function fails on a whole step's samples, instead of training on `error_value`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence

from penstock.trajectory import Group

logger = logging.getLogger(__name__)


async def pause_nothing(reason: str) -> None:
    """For readers without a run to pause."""
    del reason


class FailedRewards:
    """Counts failed rewards over the newest `groups_per_step` groups, or over the groups of the last, smaller step.

    When their share reaches `limit`, the run is paused with the reason. From then on, groups with failed rewards are
    not trained: their prompts are sampled again after the run was resumed. The first group without a failure ends
    that."""

    def __init__(
        self, limit: float | None, groups_per_step: int, pause: Callable[[str], Awaitable[None]] = pause_nothing
    ) -> None:
        """`limit` None trains on every group, whatever its rewards."""
        self.limit = limit
        self.pause = pause
        self.refuses = False
        self._newest: deque[tuple[int, int]] = deque(maxlen=groups_per_step)
        """Failed and all samples of each group."""

    async def observe(self, group: Group) -> None:
        num_failed = num_failed_rewards(group)
        if self.limit is None:
            return
        if not num_failed:
            self.refuses = False
        self._newest.append((num_failed, len(group.trajectories)))
        if len(self._newest) == self._newest.maxlen:
            await self._judge(self._newest)

    async def judge_last(self, groups: Sequence[Group]) -> None:
        """Judge the last step, which has fewer groups than the others, by its own samples alone."""
        if groups:
            await self._judge([(num_failed_rewards(group), len(group.trajectories)) for group in groups])

    async def _judge(self, counts: Collection[tuple[int, int]]) -> None:
        """Pause the run if the share of failed samples has reached the limit."""
        failed, samples = sum(failed for failed, _ in counts), sum(samples for _, samples in counts)
        if self.limit is None or failed < self.limit * samples:
            return
        self._newest.clear()
        self.refuses = True
        reason = (
            f"the reward failed on {failed} of the newest {samples} samples; correct the reward, start the run again, "
            "and resume it"
        )
        logger.error("the run pauses: %s", reason)
        await self.pause(reason)

    def is_refused(self, group: Group) -> bool:
        return self.refuses and num_failed_rewards(group) > 0


def num_failed_rewards(group: Group) -> int:
    return sum(trajectory.reward_failed for trajectory in group.trajectories)
