"""Batches: the only reader of the replay queue takes groups, checks them, and completes one batch after another.

The groups that were taken for a step are listed in its manifest in Redis, so a successor gets the same batch. The batch
of the next step is read, and passed through the frozen roles, while the current step trains: reference log-probs and
the reward model's scores depend on the groups alone, unlike the policy's log-probs and the critic's values.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from penstock.cancellation import end_task
from penstock.codec import decode_group
from penstock.config.dataset import DatasetConfig
from penstock.config.learner import LearnerConfig
from penstock.config.service import ReplayConfig
from penstock.errors import DeadlineExceeded, InvalidInput, PoisonGroup
from penstock.feed.run_end import data_has_ended
from penstock.replay.queue import GroupConsumer
from penstock.replay.queue_types import Delivery, DropReason
from penstock.samples import is_sampled
from penstock.trajectory import SESSION_AGENT, Group
from penstock_learner.agreement.servers import ServerQuarantine
from penstock_learner.batches.sequence_batch import SequenceBatch, check_tokens, unsampled_batch
from penstock_learner.steps.program import TrainingStep
from penstock_learner.term import Term

logger = logging.getLogger(__name__)


def reason_to_discard(group: Group, config: ReplayConfig) -> DropReason | Literal[""]:
    """Why the group is not trained, as one word; empty if it is. Only samples with a trained token count."""
    limits = config.group_filter
    samples = [sample for sample in group.trajectories if sample.has_trained_token]
    rewards = [sample.reward for sample in samples]
    # A group with one sample counts as having spread: the sample is not compared with itself. A session is one sample,
    # however many paths it has.
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)
    num_samples = len({sample.episode or -number for number, sample in enumerate(samples, 1)})
    if num_samples != 1 and (config.dynamic_sampling and spread == 0 or spread < limits.min_spread):
        return "no_spread"
    drawn = [sample.reward for sample in samples if not sample.is_baseline]
    rate = sum(reward >= limits.pass_reward for reward in drawn) / len(drawn) if drawn else 0.0
    if not limits.min_pass_rate <= rate <= limits.max_pass_rate:
        return "pass_rate"
    longest = max((len(sample.token_ids) for sample in group.trajectories), default=0)
    return "too_long" if limits.max_response_tokens is not None and longest > limits.max_response_tokens else ""


class FailedRewards:
    """Counts failed rewards over the newest `groups_per_step` groups, or over the groups of the last, smaller step.
    When their share reaches `limit`, the run is paused with the reason. From then on, groups with failed rewards are
    not trained: their prompts are sampled again after the run was resumed. The first group without a failure ends
    that."""

    def __init__(
        self, limit: float | None, groups_per_step: int, pause: Callable[[str], Awaitable[None]] | None = None
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
        if self.pause is not None:
            await self.pause(reason)

    def is_refused(self, group: Group) -> bool:
        return self.refuses and num_failed_rewards(group) > 0


def num_failed_rewards(group: Group) -> int:
    return sum(trajectory.reward_failed for trajectory in group.trajectories)


@dataclass(frozen=True)
class DataEnd:
    """The end of the dataset of one run: the feed has submitted all epochs, and every prompt has left the queue."""

    queue: GroupConsumer
    config: DatasetConfig

    @property
    def drops_remainder(self) -> bool:
        return self.config.last_batch == "drop"

    async def is_reached(self) -> bool:
        """Whether no more groups will come. Groups that the learner has taken do not count."""
        return await data_has_ended(self.queue, self.config)

    async def raise_if_nothing_was_trained(self, step: int) -> None:
        """Raise InvalidInput if the data ended before the first step: such a run has failed."""
        if step > 0:
            return
        stat = await self.queue.stat()
        what = f"{stat.dead_lettered} prompts were dead-lettered and {stat.discarded} groups were dropped"
        advice = "correct the dataset, the model's chat template or rollout.prompt, and start a new run"
        if not stat.inserted:
            what = f"all {stat.dead_lettered} prompts were dead-lettered, and there is nothing to train on"
        if (await self.queue.expired_reasons()).get("remainder"):
            what = "it has fewer prompts than replay.groups_per_step"
            advice = "set dataset.last_batch to train, or lower replay.groups_per_step"
        raise InvalidInput(f"dataset {self.config.name!r}", f"it ended before the first step: {what}; {advice}")


WAIT_S = 1.0
"""Longest wait for a signal that a group is ready. A lost signal costs no more than this."""
GATHER_S = 0.02
"""Pause after the signal, so that groups that come shortly after each other are taken together."""
DECODED_AT_ONCE = 32
"""Groups that one thread call decodes. It bounds how long a cancelled read keeps a thread busy."""


@dataclass(frozen=True)
class Batch:
    """The groups of one step: fewer than `replay.groups_per_step` if the dataset has ended, none if no step follows."""

    step: int
    groups: tuple[Group, ...]
    prompts: Mapping[int, bytes] = field(default_factory=dict)
    """Encoded prompts, by id, of the groups whose text is written (`learner.samples`); empty if one is missing."""

    @property
    def trace_parents(self) -> tuple[str, ...]:
        return tuple(group.trace_parent for group in self.groups if group.trace_parent)

    @property
    def prompt_ids(self) -> list[int]:
        return [group.prompt_id for group in self.groups]


@dataclass(eq=False)
class BatchReader:
    """Completes one batch after another, for one term. Groups with tokens beyond `vocabulary_size`, if given, are
    malformed. No deadline runs out while the run `is_paused`. Invariant: no prompt is in two batches, even if Redis
    loses its newest writes and offers a group that was already taken."""

    queue: GroupConsumer
    replay: ReplayConfig
    learner: LearnerConfig
    term: Term
    vocabulary_size: int | None = None
    quarantine: ServerQuarantine | None = None
    failed_rewards: FailedRewards = field(default_factory=lambda: FailedRewards(None, 1))
    is_paused: Callable[[], Awaitable[bool]] | None = None
    data_end: DataEnd | None = None
    """Without it, a batch is always completed."""
    _in_batches: set[int] = field(default_factory=set)
    """Prompts of batches that were returned and are not in the ledger yet."""

    async def read(self, step: int, policy_version: int, wanted: asyncio.Event | None = None) -> Batch:
        """The batch of `step`: first the groups that an earlier learner took for it, then groups from the queue. The
        deadline starts when `wanted` is set, or at once without it, so reading may take as long as the step before."""
        self._in_batches = {prompt_id for prompt_id in self._in_batches if prompt_id not in self.term.ledger}
        groups = await self._accept(self.term.take_manifest(step), policy_version)
        return await self._complete(step, groups, policy_version, wanted)

    async def replace_outdated(self, batch: Batch, wanted: asyncio.Event | None = None) -> Batch:
        """The batch after a rewind: `replace` for the groups that may no longer be trained."""
        version = self.term.policy_version
        outdated = [group.prompt_id for group in batch.groups if self._is_outdated(group, version)]
        return await self.replace(batch, wanted, outdated, "stale")

    async def replace(
        self, batch: Batch, wanted: asyncio.Event | None, prompt_ids: Collection[int], reason: DropReason
    ) -> Batch:
        """The batch with other groups in place of these, which are expired for `reason`: groups that the term's weights
        may train. The same object if there are none to replace. The deadline is as in `read`."""
        if not prompt_ids:
            return batch
        kept = await self._without(batch.groups, prompt_ids, reason)
        return await self._complete(batch.step, kept, self.term.policy_version, wanted)

    async def _without(self, groups: Sequence[Group], prompt_ids: Collection[int], reason: DropReason) -> list[Group]:
        """The groups of other prompts. The groups of these prompts are expired for `reason`."""
        for group in groups:
            if group.prompt_id in prompt_ids:
                self._in_batches.discard(group.prompt_id)
                await self._expire(group, reason)
        return [group for group in groups if group.prompt_id not in prompt_ids]

    async def _expire(self, group: Group, reason: DropReason) -> None:
        """Drop a group. Its prompt is sampled again, unless it was a session of a harness."""
        if group.agent_name == SESSION_AGENT:
            await self.queue.discard(group.prompt_id, reason)
        else:
            await self.queue.expire(group.prompt_id, reason)

    async def _without_failed(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that the limit on failed rewards accepts. The prompts of the others are sampled again."""
        refused = [group.prompt_id for group in groups if self.failed_rewards.is_refused(group)]
        return await self._without(groups, refused, "reward_failed")

    async def _complete(
        self, step: int, groups: list[Group], policy_version: int, wanted: asyncio.Event | None = None
    ) -> Batch:
        deadline = math.inf
        while (missing := self.replay.groups_per_step - len(groups)) > 0:
            taken = await self.queue.take(step, missing)
            groups += await self._accept(taken, policy_version)
            groups = await self._without_failed(groups)
            if not taken:
                if self.data_end is not None and await self.data_end.is_reached():
                    num_groups = len(groups)
                    if not self.data_end.drops_remainder:
                        await self.failed_rewards.judge_last(groups)
                        groups = await self._without_failed(groups)
                    if len(groups) == num_groups:
                        return await self._remainder(step, groups, self.data_end)
                    continue  # their prompts are pending again, so the data has not ended
                if deadline == math.inf and (wanted is None or wanted.is_set()):
                    deadline = time.monotonic() + self.learner.batch_timeout_s
                if time.monotonic() > deadline and self.is_paused is not None and await self.is_paused():
                    deadline = time.monotonic() + self.learner.batch_timeout_s
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"step {step} has {len(groups)} of {self.replay.groups_per_step} groups after "
                        f"{self.learner.batch_timeout_s:.0f} s; are prompts submitted and rollout servers READY?"
                    )
                await self.queue.wait_for_groups(min(WAIT_S, max(0.0, deadline - time.monotonic())))
                await asyncio.sleep(GATHER_S)
        return Batch(step, tuple(groups), await self._prompts(groups))

    async def _remainder(self, step: int, groups: list[Group], data_end: DataEnd) -> Batch:
        """The batch of the last step, from what is left of the dataset. Empty if nothing is left or it is dropped."""
        if data_end.drops_remainder:
            for group in groups:
                self._in_batches.discard(group.prompt_id)
                await self.queue.discard(group.prompt_id, "remainder")
            groups = []
        return Batch(step, tuple(groups), await self._prompts(groups))

    async def _prompts(self, groups: Sequence[Group]) -> dict[int, bytes]:
        """Prompts are deleted when their groups are committed, so they are read here, while an earlier step trains."""
        ids = [group.prompt_id for group in groups if is_sampled(group.prompt_id, self.learner.samples.share)]
        return dict(zip(ids, await self.queue.prompts(ids), strict=True))

    async def _accept(self, prompt_ids: list[int], policy_version: int) -> list[Group]:
        """The groups of these prompts that may be trained. They are decoded in a thread, so that pushes and heartbeats
        continue on the event loop."""
        accepted = []
        deliveries = await self.queue.fetch(prompt_ids)
        for first in range(0, len(deliveries), DECODED_AT_ONCE):
            some = deliveries[first : first + DECODED_AT_ONCE]
            for delivery, decoded in zip(some, await asyncio.to_thread(self._decode, some), strict=True):
                group = await self._check(delivery, decoded, policy_version)
                if group is not None:
                    self._in_batches.add(group.prompt_id)
                    accepted.append(group)
        return accepted

    def _decode(self, deliveries: Sequence[Delivery]) -> list[Group | PoisonGroup]:
        """Decode the groups, in a thread. The result has an error in place of a group that cannot be trained."""
        decoded: list[Group | PoisonGroup] = []
        for delivery in deliveries:
            try:
                group = decode_group(delivery.payload)
                if group.prompt_id != delivery.prompt_id:
                    detail = f"it is stored as prompt {delivery.prompt_id} and says {group.prompt_id}"
                    raise PoisonGroup("identity", detail)
                if (
                    self.learner.algorithm.advantage.has_baseline
                    and sum(sample.is_baseline for sample in group.trajectories) != 1
                ):
                    detail = "it has no greedy sample to compare with; is the servers' config the same?"
                    raise PoisonGroup("shape", detail)
                if self.vocabulary_size is not None:
                    check_tokens(group, self.vocabulary_size)
                decoded.append(group)
            except PoisonGroup as error:
                decoded.append(error)
        return decoded

    async def _check(self, delivery: Delivery, decoded: Group | PoisonGroup, policy_version: int) -> Group | None:
        """The group, or None if it must not be trained: its prompt was trained already, it is malformed, its server is
        in quarantine, or as the config says, it is too old, its rewards fail, or it is filtered."""
        if delivery.prompt_id in self._in_batches or delivery.prompt_id in self.term.ledger:
            # A group that no checkpoint covers yet must stay: the next checkpoint commits it.
            if self.term.ledger.is_durable(delivery.prompt_id):
                await self.queue.commit(0, [delivery.prompt_id])
            return None
        if isinstance(decoded, PoisonGroup):
            logger.warning("group of prompt %d is dead-lettered: %s", delivery.prompt_id, decoded)
            await self.queue.dead_letter(delivery.prompt_id, f"{decoded.kind}: {decoded}")
            return None
        if self._is_outdated(decoded, policy_version):
            await self._expire(decoded, "stale")
            return None
        if self.quarantine is not None and await self.quarantine.refuses(decoded):
            await self._expire(decoded, "quarantined")
            return None
        await self.failed_rewards.observe(decoded)
        if self.failed_rewards.is_refused(decoded):
            await self._expire(decoded, "reward_failed")
            return None
        if reason := reason_to_discard(decoded, self.replay):
            await self.queue.discard(decoded.prompt_id, reason)
            if self.quarantine is not None:
                await self.quarantine.one_more_probe(decoded)
            return None
        return decoded

    def _is_outdated(self, group: Group, policy_version: int) -> bool:
        """Whether the group is too old, or has tokens of an abandoned version. With `stale_policy` wait, none is too
        old unless more were admitted than this config would have admitted."""
        staleness = policy_version - self.term.oldest_version(group)
        drops = self.replay.stale_policy == "drop" or (self.replay.stale_policy == "wait" and self.term.num_overdue)
        is_stale = drops and staleness > self.replay.max_staleness
        return is_stale or self.term.abandons(group)


@dataclass(frozen=True, eq=False)
class BatchAhead:
    """Two tasks: `reading`, and `forwards`, which starts when the batch is read. Set `wanted` when training waits for
    the batch; its deadline starts then. Call `end` on a batch that will not be trained."""

    reading: asyncio.Task[Batch]
    forwards: asyncio.Task[SequenceBatch]
    wanted: asyncio.Event
    replaced: BatchAhead | None = None
    """The batch that this one was made from, whose tasks it awaits."""

    @classmethod
    def begin(cls, reader: BatchReader, training: TrainingStep, step: int, version: int) -> BatchAhead:
        """Start to read the batch of `step`, which weights of `version` will train."""
        wanted = asyncio.Event()
        reading = asyncio.create_task(reader.read(step, version, wanted))

        async def forwards() -> SequenceBatch:
            return await _ahead(training, await reading)

        return cls(reading, asyncio.create_task(forwards()), wanted)

    def replaced_by(
        self, training: TrainingStep, replace: Callable[[Batch, asyncio.Event], Awaitable[Batch]]
    ) -> BatchAhead:
        """The batch that `replace` makes of this one, given `wanted`. The computed forwards are kept if it has the same
        groups."""

        async def read() -> Batch:
            return await replace(await self.reading, self.wanted)

        reading = asyncio.create_task(read())

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
    return await training.ahead(batch.groups) if batch.groups else unsampled_batch(*[np.zeros(0, np.int64)] * 4)
