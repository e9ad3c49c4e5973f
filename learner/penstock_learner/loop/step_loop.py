"""The loop over steps within one term: a group enters with `read` and leaves with `commit`.

    read batch ─► compare servers ─► training step ─► gather ─► publish ┐
        ▲  (the next batch is read,      (the push runs beside the next │
        │   scored and compared with      step's forward and update)    │
        │   the reference meanwhile)                                    │
        └──────── every N steps: checkpoint ─► commit (acknowledge) ◄───┘

Groups of a server whose log-probs disagree with the learner's are replaced before the step (server_agreement.py).

A group is acknowledged only after a durable checkpoint whose ledger holds its prompt. Every call to the queue carries
the term, so a learner that was replaced cannot acknowledge anything.

The loop ends after `num_steps`, or when the dataset has ended: the last batch is then smaller, or left out.

A roll back is followed between two steps (roll_back.py). The weights of the older version get a new number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.api.records import FIRST_BATCH
from penstock.config.run import RunConfig
from penstock.logs import bind
from penstock.machine.garbage import spare_living_objects
from penstock.replay.contract import GroupConsumer
from penstock.replay.recomputed import RecomputedLogProbs
from penstock.store.heartbeats import LEARNER
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import Orders
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.checkpoints.checkpoint import CheckpointStore
from penstock_learner.checkpoints.writer import CheckpointWriter
from penstock_learner.crash_points import crash_point
from penstock_learner.loggers.samples import SampleLog, TrainedStep
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loop.batches import Batch, BatchAhead, BatchReader, DataEnd
from penstock_learner.loop.operator_orders import OperatorOrders
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.loop.roll_back import RollBack, load_version
from penstock_learner.loop.server_agreement import ServerAgreement
from penstock_learner.loop.step_metrics import overhead_metrics
from penstock_learner.loop.step_records import StepRecords
from penstock_learner.loop.term import Term
from penstock_learner.loop.training_step import TrainingStep
from penstock_learner.roles.profiling import profiles_folder
from penstock_learner.roles.role_group import RoleGroup, gather_all

logger = logging.getLogger(__name__)
SMALL_VOCABULARY = 256
"""Tokens that every model has, if its config does not say how many there are."""
STARVED_SHARE = 0.25
"""Share of `batch_timeout_s` after which a learner without a batch acknowledges its groups early."""


class StepProfiles:
    """Tells the configured ranks of every role to record the configured steps."""

    def __init__(self, config: RunConfig, roles: Mapping[str, RoleGroup]) -> None:
        self.config = config.learner.profile
        self.folder = profiles_folder(config)
        self.roles = roles

    @contextlib.asynccontextmanager
    async def of_step(self, step: int) -> AsyncIterator[None]:
        """Record what the roles do in the `async with` block. A step that fails writes no trace."""
        if step not in self.config.steps:
            yield
            return
        await self._call("start_profile")
        yield
        await self._call("write_profile", self.folder, step)

    async def _call(self, method: str, *arguments: Path | int) -> None:
        ranks = [(role, rank) for role in self.roles.values() for rank in self.config.ranks if rank < role.num_ranks]
        await gather_all(*(role.call_rank(rank, method, *arguments) for role, rank in ranks))


@dataclass(frozen=True)
class StepLoop:
    """Trains one step after another, until the last one, the end of the data, or the operator's order to stop."""

    config: RunConfig
    term: Term
    queue: GroupConsumer
    orders: OperatorOrders
    reader: BatchReader
    data_end: DataEnd
    training: TrainingStep
    profiles: StepProfiles
    agreement: ServerAgreement
    recomputed: RecomputedLogProbs
    """Keeps the learner's own log-probs of a few groups, which the gateway shows."""
    publication: PolicyPublication
    records: StepRecords
    loggers: StepLoggers
    samples: SampleLog
    writer: CheckpointWriter
    phases: Phases
    trained: Mapping[str, RoleGroup]
    """The roles whose weights change."""
    checkpoints: CheckpointStore
    policies: PolicyRegistry

    async def run(self) -> None:
        """Train until the last step, the end of the data or a stop. Ends with a checkpoint that covers every group
        that was trained."""
        await self.phases.enter(LEARNER, "publishing the weights that the run starts from")
        await self._publish_start()
        await self.agreement.begin()
        current: BatchAhead | None = None
        following: BatchAhead | None = None
        ended: float | None = None
        has_trained = False
        try:
            if self.training.compiles and not self._is_last(self.term.step):
                following = self._read_ahead(self.term.step + 1, self.term.policy_version)
                await self._rehearse(following)
            spare_living_objects()
            await self.phases.enter(LEARNER, FIRST_BATCH)
            while not self.orders.stopping.is_set() and not self._is_last(self.term.step):
                if (orders := await self.orders.new_roll_back()) is not None:
                    await self._roll_back(orders)
                    following = following and following.after_roll_back(
                        self.reader, self.training, self.term.policy_version
                    )
                started = time.monotonic()
                current = following = following or self._read_ahead(self.term.step + 1, self.term.policy_version)
                batch = await self._batch_unless_interrupted(current)
                if batch is None:
                    continue
                if not batch.groups:
                    await self.data_end.raise_if_nothing_was_trained(self.term.step)
                    logger.info("the dataset has ended after step %d", self.term.step)
                    break
                wait_s = time.monotonic() - started
                version = self.term.policy_version
                if refused := await self.agreement.refused(batch, version, self.term.roll_backs):
                    following = current.without(self.reader, self.training, refused, version)
                    continue
                crash_point("after_read")
                if not has_trained:
                    await self.phases.enter(LEARNER, "training")
                    has_trained = True
                is_last = self._is_last(batch.step)
                following = None if is_last else self._read_ahead(batch.step + 1, self.term.policy_version + 1)
                metrics = {"wait_s": wait_s} | await self._train(batch, current.forwards)
                crash_point("mid_step")
                metrics["between_s"] = 0.0 if ended is None else started - ended
                ended = await self._publish(batch, metrics, started)
                self.writer.raise_if_failed()
                if batch.step % self.config.learner.checkpoint.every_steps == 0:
                    await self._checkpoint()
            await self._finish()
        finally:
            for unused in (current, following):
                if unused is not None:
                    await unused.end()

    async def _rehearse(self, first: BatchAhead) -> None:
        """Compile the layers while the servers start and generate the first batch."""
        await self.phases.enter(LEARNER, "compiling, while the servers make the first batch")

        def is_needed() -> bool:
            return not first.reading.done() and not self.orders.stopping.is_set()

        num_samples, max_tokens = self.config.dataset.num_samples, self.config.rollout.engine.max_model_len
        vocabulary = self.reader.vocabulary_size or SMALL_VOCABULARY
        num_batches = await self.training.rehearse(num_samples, max_tokens, vocabulary, is_needed)
        logger.info("compiled with %d batches of random tokens", num_batches)

    async def _finish(self) -> None:
        """Publish and save what was trained. If no step follows, record that the run has finished."""
        if self.orders.stopping.is_set():
            await self._checkpoint()  # before the push, because the operator may not wait that long
        await self.publication.wait_until_published()
        await self._checkpoint()
        await self.writer.wait_until_written()
        if not self.orders.stopping.is_set():
            await self.publication.keep_last()
            await self.queue.finish(self.term.step)

    def _is_last(self, step: int) -> bool:
        """Whether the config allows no step after this one. The data may end before."""
        return self.config.dataset.validation.only or 0 < self.config.learner.num_steps <= step

    def _read_ahead(self, step: int, policy_version: int) -> BatchAhead:
        return BatchAhead.begin(self.reader, self.training, step, policy_version)

    async def _publish_start(self) -> None:
        """Publish the weights that the term starts from.

        Version 0 is the model folder, which servers load themselves. Resumed weights get a new version, which is no
        step and does not count as staleness. After going back, groups that the versions in between have sampled are
        dropped, as after a roll back."""
        was_published = (await self.queue.stat()).policy_version > 0
        is_new = self.term.step == 0 and not was_published
        version = 0 if is_new else await self.queue.allocate_version(self.term.policy_version + 1)
        if not is_new:
            is_restart = not self.term.has_gone_back
            self.term.add_roll_back(RollBack(self.term.policy_version, version, is_restart))
        self.term.policy_version = version
        offer = await self.publication.gather(version, self.term.step)
        offer.metrics.set_result({})
        await self.publication.wait_until_published()

    async def _roll_back(self, orders: Orders) -> None:
        """Go back to the ordered version, if its weights still exist. An order is handled once."""
        self.term.num_roll_backs = orders.roll_backs
        target = orders.roll_back_version
        if not await load_version(target, self.trained, self.checkpoints, self.policies):
            return
        version = await self.queue.allocate_version(self.term.policy_version + 1)
        self.term.policy_version = version
        self.term.add_roll_back(RollBack(target, version))
        offer = await self.publication.gather(version, self.term.step, parent_version=target)
        offer.metrics.set_result({})
        # Wait, or the next step's version could replace this one, whose record says where the weights came from.
        await self.publication.wait_until_published()

    async def _batch_unless_interrupted(self, ahead: BatchAhead) -> Batch | None:
        """The batch, or None if the operator orders a stop or a roll back before it is complete.

        Groups that no checkpoint covers stay in Redis, and producers may be waiting for their memory. So if the batch
        takes long, a checkpoint is made early."""
        ahead.wanted.set()
        await self.orders.wait_for_either(ahead.reading, self.config.learner.batch_timeout_s * STARVED_SHARE)
        if not ahead.reading.done() and not self.orders.interrupts:
            await self._checkpoint()
            await self.writer.wait_until_written()
            await self.orders.wait_for_either(ahead.reading, None)  # the reader has a deadline
        return ahead.reading.result() if ahead.reading.done() else None

    async def _train(self, batch: Batch, forwards: asyncio.Task[SequenceBatch]) -> dict[str, float]:
        """Train on the batch. Afterwards the policy's ranks hold the new weights, which are not published yet."""
        bind(step=batch.step, policy_version=self.term.policy_version)
        started_s = time.time()
        async with self.profiles.of_step(batch.step):
            metrics = await self.training.run(
                batch.groups, batch.step, self.term.policy_version, self.term.kl.coefficient, forwards,
                self.term.roll_backs,
            )  # fmt: skip
        self.agreement.check.remember(metrics)
        if self.training.recomputed is not None:
            await self.recomputed.keep(batch.groups, self.training.recomputed)
        self.term.add_trained(batch, metrics)
        self.records.trace(batch, started_s, self.term)
        return metrics

    async def _publish(self, batch: Batch, metrics: dict[str, float], started: float) -> float:
        """Give the new weights a version, offer the version to the servers, and record the step, begun at `started`.
        Returns when the step ended."""
        version = await self.queue.allocate_version(self.term.policy_version + 1)
        self.term.policy_version = version
        gather_started = time.monotonic()
        offer = await self.publication.gather(version, batch.step, batch.trace_parents)
        ended = time.monotonic()
        metrics |= {"gather_s": ended - gather_started, "step_s": ended - started, "policy_version": float(version)}
        metrics |= overhead_metrics(metrics, self.publication.computed_s)
        metrics["tokens_per_second"] = metrics["response_tokens"] / metrics["step_s"]
        metrics["in_flight_updates"] = float(self.publication.in_flight_updates)
        await self.records.record(batch, metrics, self.training.rewards, self.term, self.loggers)
        self.samples.add(TrainedStep(batch.step, version, batch.groups, batch.prompts, self.training.rewards))
        offer.metrics.set_result(self.agreement.check.last | metrics)
        return ended

    async def _checkpoint(self) -> None:
        """Begin a checkpoint of everything trained so far. Its groups are acknowledged once it is durable."""
        if not self.term.uncommitted:
            return
        state = self.term.trainer_state({name: feed.position for name, feed in (await self.queue.feeds()).items()})
        covered, self.term.uncommitted = self.term.uncommitted, []
        await self.writer.begin(state, covered)
