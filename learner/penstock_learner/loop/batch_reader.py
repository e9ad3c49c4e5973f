"""The one reader of the replay queue: takes groups, checks them, and completes batches.

Ranks never read. What was taken for a step is in that step's manifest in Redis, so a successor gets the same batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.codec import decode_group
from penstock.config.learner import LearnerConfig
from penstock.config.service import ReplayConfig
from penstock.errors import DeadlineExceeded, PoisonGroup
from penstock.replay.contract import Delivery, GroupConsumer
from penstock.trajectory import Group
from penstock_learner.loop.ledger import Ledger
from penstock_learner.loop.roll_back import RollBack, oldest_version

logger = logging.getLogger(__name__)
POLL_S = 0.02


@dataclass(frozen=True)
class Batch:
    step: int
    groups: tuple[Group, ...]

    @property
    def trace_parents(self) -> tuple[str, ...]:
        """Trace contexts of the groups that are traced."""
        return tuple(group.trace_parent for group in self.groups if group.trace_parent)

    @property
    def prompt_ids(self) -> list[int]:
        return [group.prompt_id for group in self.groups]


class BatchReader:
    """Completes one batch after another. `ledger` is shared with the controller and only read here.

    Invariant: no prompt is in two batches, even where Redis lost the tail in which it had been taken."""

    def __init__(
        self, queue: GroupConsumer, replay: ReplayConfig, learner: LearnerConfig, ledger: Ledger,
        manifests: dict[int, list[int]], roll_backs: Sequence[RollBack] = (),
    ) -> None:  # fmt: skip
        self.queue = queue
        self.replay = replay
        self.learner = learner
        self.ledger = ledger
        self.manifests = manifests
        self.roll_backs = roll_backs
        """Shared with the controller and only read here."""
        self._in_batches: set[int] = set()
        """Handed out, and not yet in the ledger."""

    async def read(self, step: int, policy_version: int, wanted: asyncio.Event | None = None) -> Batch:
        """The batch of `step`: first what an earlier learner had taken for it, then the queue.

        The deadline runs once the batch is `wanted`, by default at once: what is read beside a long step may take as
        long as the step."""
        self._in_batches = {prompt_id for prompt_id in self._in_batches if prompt_id not in self.ledger}
        groups = await self._accept(self.manifests.pop(step, []), policy_version)
        return await self._complete(step, groups, policy_version, wanted)

    async def read_again(self, batch: Batch, policy_version: int, wanted: asyncio.Event | None = None) -> Batch:
        """The batch, with others in the place of groups that a roll back since it was read has made unwanted. The
        deadline is as in `read`."""
        outdated = [group.prompt_id for group in batch.groups if self._is_outdated(group, policy_version)]
        if not outdated:
            return batch
        for prompt_id in outdated:
            self._in_batches.discard(prompt_id)
            await self.queue.expire(prompt_id)
        kept = [group for group in batch.groups if group.prompt_id not in outdated]
        return await self._complete(batch.step, kept, policy_version, wanted)

    async def _complete(
        self, step: int, groups: list[Group], policy_version: int, wanted: asyncio.Event | None = None
    ) -> Batch:
        deadline = math.inf
        while (missing := self.replay.groups_per_step - len(groups)) > 0:
            taken = await self.queue.take(step, missing)
            groups += await self._accept(taken, policy_version)
            if not taken:
                if deadline == math.inf and (wanted is None or wanted.is_set()):
                    deadline = time.monotonic() + self.learner.batch_timeout_s
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"step {step} has {len(groups)} of {self.replay.groups_per_step} groups after "
                        f"{self.learner.batch_timeout_s:.0f} s; are prompts submitted and rollout servers READY?"
                    )
                await asyncio.sleep(POLL_S)
        return Batch(step, tuple(groups))

    async def _accept(self, prompt_ids: list[int], policy_version: int) -> list[Group]:
        accepted = []
        for delivery in await self.queue.fetch(prompt_ids):
            group = await self._check(delivery, policy_version)
            if group is not None:
                self._in_batches.add(group.prompt_id)
                accepted.append(group)
        return accepted

    async def _check(self, delivery: Delivery, policy_version: int) -> Group | None:
        """Decode; set aside what is trained already, poisonous or, by policy, too old or without reward spread."""
        if delivery.prompt_id in self._in_batches or delivery.prompt_id in self.ledger:
            # What no checkpoint covers yet must stay: the next one's commit takes it.
            if self.ledger.is_durable(delivery.prompt_id):
                await self.queue.commit(0, [delivery.prompt_id])
            return None
        try:
            group = decode_group(delivery.payload)
            if group.prompt_id != delivery.prompt_id:
                raise PoisonGroup("identity", f"it is stored as prompt {delivery.prompt_id} and says {group.prompt_id}")
            if self.learner.algorithm.advantage.has_baseline and not _has_baseline(group):
                raise PoisonGroup("shape", "it has no greedy sample to compare with; is the servers' config the same?")
        except PoisonGroup as error:
            logger.warning("group of prompt %d is dead-lettered: %s", delivery.prompt_id, error)
            await self.queue.dead_letter(delivery.prompt_id, f"{error.kind}: {error}")
            return None
        if self._is_outdated(group, policy_version):
            await self.queue.expire(group.prompt_id)
            return None
        if self.replay.dynamic_sampling and not _has_spread(group):
            await self.queue.discard(group.prompt_id, "no_spread")
            return None
        return group

    def _is_outdated(self, group: Group, policy_version: int) -> bool:
        """Whether it is too old, where that matters, or of a version that was given up."""
        staleness = policy_version - oldest_version(group, self.roll_backs)
        is_stale = self.replay.stale_policy == "drop" and staleness > self.replay.max_staleness
        return is_stale or any(roll_back.gave_up(group) for roll_back in self.roll_backs)


def _has_baseline(group: Group) -> bool:
    return sum(trajectory.is_baseline for trajectory in group.trajectories) == 1


def _has_spread(group: Group) -> bool:
    """Whether the samples can be told apart by reward. A group of one sample is not compared within itself."""
    return len(group.trajectories) == 1 or len({trajectory.reward for trajectory in group.trajectories}) > 1
