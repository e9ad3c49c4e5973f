"""The loop over steps within one term: a group enters with `read` and leaves with `commit`.

    read batch ─► compare servers ─► training step ─► stage ─► publish ─┐
        ▲  (the next batch is read,      (the push runs during the next │
        │   scored and compared with      step's forward and update)    │
        │   the reference meanwhile)                                    │
        └──────── every N steps: checkpoint ─► commit (acknowledge) ◄───┘

| task of a term          | waits for                                 | unblocked by                              |
|-------------------------|-------------------------------------------|-------------------------------------------|
| StepLoop.run            | a batch                                   | BatchAhead.reading, an order, a deadline  |
|                         | the version that a term or rewind starts  | publish_loop                              |
|                         | the checkpoint before, when one begins    | CheckpointWriter                          |
| BatchAhead.reading      | groups in the queue, up to batch_timeout_s| rollout servers, the end of the data      |
| BatchAhead.forwards     | the batch, then the frozen roles          | BatchAhead.reading, the roles' ranks      |
| CheckpointWriter        | the ranks' files, the upload, the commit  | the ranks, the object store, Redis        |
| publish_loop, catch_up  | see publication.py                        |                                           |
| OperatorOrders.watch    | orders, every POLL_S                      | an operator                               |
| validations, silences   | scores and reports of servers, by a timer | rollout servers                           |

Groups of a server whose log-probs disagree with the learner's are replaced before the step (agreement/servers.py).

A group is acknowledged only after a durable checkpoint whose ledger holds its prompt. Every call to the queue carries
the term, so a learner that was replaced cannot acknowledge anything.

The loop ends after `num_steps`, or when the dataset has ended: the last batch is then smaller, or dropped.

An order to rewind is followed between two steps (take_over.py). The weights of the older version get a new number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.cancellation import end_task
from penstock.config.gpu_bundles import num_gpus
from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.logs import bind
from penstock.machine import freeze_loaded_objects
from penstock.replay.queue import GroupConsumer
from penstock.replay.results import RecomputedLogProbs
from penstock.store.fleet import Orders, RunControl
from penstock.store.heartbeats import LEARNER, Phases
from penstock.store.reports import FIRST_BATCH
from penstock.tracing import Tracing
from penstock_learner.agreement.servers import ServerAgreement
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.checkpoints import CheckpointStore, FileRecord, shards_folder
from penstock_learner.crash_points import crash_point
from penstock_learner.loggers.samples import SampleLog, TrainedStep
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loop.batches import Batch, BatchAhead, BatchReader
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.loop.take_over import load_version
from penstock_learner.metrics import LearnerMetrics, mfu, peak_flops
from penstock_learner.roles.dispatch import RankUsage
from penstock_learner.roles.profiling import profiles_folder
from penstock_learner.roles.role_group import SAVE_LANE, RoleGroup, gather_all
from penstock_learner.steps.program import TrainingStep
from penstock_learner.steps.step_result import StepResult, StepTimes, flattened, mean_rewards
from penstock_learner.term import Term, TrainerState

logger = logging.getLogger(__name__)
POLL_S = 0.5
SMALL_VOCABULARY = 256
"""Tokens that every model has, if its config does not say how many there are."""
STARVED_SHARE = 0.25
"""Share of `batch_timeout_s` after which a learner without a batch acknowledges its groups early."""
USAGE_EVERY_S = 5.0
"""How often the ranks are asked for their memory. Each time is a call between two steps."""


@dataclass(frozen=True)
class StepLoop:
    """Trains one step after another, until the last one, the end of the data, or the operator's order to stop."""

    config: RunConfig
    term: Term
    queue: GroupConsumer
    orders: OperatorOrders
    reader: BatchReader
    training: TrainingStep
    agreement: ServerAgreement
    recomputed: RecomputedLogProbs
    """Keeps the learner's own log-probs of a few groups, which the gateway shows."""
    publication: PolicyPublication
    records: StepRecords
    loggers: StepLoggers
    samples: SampleLog
    writer: CheckpointWriter
    phases: Phases

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
            if self.config.learner.compile and not self._is_last(self.term.step):
                following = self._read_ahead(self.term.step + 1)
                await self._rehearse(following)
            freeze_loaded_objects()
            await self.phases.enter(LEARNER, FIRST_BATCH)
            while not self.orders.stopping.is_set() and not self._is_last(self.term.step):
                if (orders := await self.orders.new_rewind()) is not None:
                    await self._rewind(orders)
                    following = following and following.replaced_by(self.training, self.reader.replace_outdated)
                started = time.monotonic()
                current = following = following or self._read_ahead(self.term.step + 1)
                batch = await self._batch_unless_interrupted(current)
                if batch is None:
                    continue
                if not batch.groups:
                    assert self.reader.data_end is not None, "only the end of the data gives an empty batch"
                    await self.reader.data_end.raise_if_nothing_was_trained(self.term.step)
                    logger.info("the dataset has ended after step %d", self.term.step)
                    break
                wait_s = time.monotonic() - started
                if refused := await self.agreement.refused(batch.step, batch.groups, self.term):
                    following = current.replaced_by(
                        self.training, partial(self.reader.replace, prompt_ids=refused, reason="quarantined")
                    )
                    continue
                compare_s = time.monotonic() - started - wait_s
                crash_point("after_read")
                if not has_trained:
                    await self.phases.enter(LEARNER, "training")
                    has_trained = True
                following = None if self._is_last(batch.step) else self._read_ahead(batch.step + 1, ahead=1)
                result = await self._train(batch, current.forwards)
                crash_point("mid_step")
                before_s = (wait_s, compare_s, 0.0 if ended is None else started - ended)
                ended = await self._publish(batch, result, started, before_s)
                self.writer.raise_if_failed()
                if batch.step % self.config.learner.checkpoint.every_steps == 0:
                    await self._checkpoint()
            await self._finish()
        finally:
            for unused in (current, following):
                if unused is not None:
                    await unused.end()

    async def _rehearse(self, first: BatchAhead) -> None:
        """Compile what a step runs, until the first batch is complete."""
        await self.phases.enter(LEARNER, "compiling, while the servers make the first batch")
        await self.training.rehearse(
            self.config.dataset.num_samples, self.config.rollout.engine.max_model_len,
            self.reader.vocabulary_size or SMALL_VOCABULARY,
            lambda: not first.reading.done() and not self.orders.stopping.is_set(),
        )  # fmt: skip

    async def _finish(self) -> None:
        """Publish and save what was trained. If no step follows, record that the run has finished."""
        if self.orders.stopping.is_set():
            await self._checkpoint()  # before the push, because the operator may not wait that long
        await self.publication.wait_until_published()
        await self._checkpoint()
        await self.writer.wait_until_written()
        await repeat_lost_commits(self.queue, self.term)
        if not self.orders.stopping.is_set():
            await self.publication.keep_last()
            await self.queue.finish(self.term.step)

    def _is_last(self, step: int) -> bool:
        """Whether the config allows no step after this one. The data may end before."""
        return self.config.dataset.validation.only or 0 < self.config.learner.num_steps <= step

    def _read_ahead(self, step: int, ahead: int = 0) -> BatchAhead:
        """Read the batch of a step for the version that is `ahead` versions from the term's."""
        return BatchAhead.begin(self.reader, self.training, step, self.term.policy_version + ahead)

    async def _publish_start(self) -> None:
        """Publish the weights that the term starts from. Version 0 is the model folder, which servers load themselves.
        The weights of a checkpoint get a new version, which is not a step and does not count as staleness. If the run
        was rewound to the checkpoint, groups that the versions in between have sampled are dropped."""
        was_published = (await self.queue.stat()).policy_version > 0
        if self.term.step == 0 and not was_published:
            self.term.advance(0)
        else:
            version = await self.queue.allocate_version(self.term.policy_version + 1)
            self.term.rewind(self.term.policy_version, version, self.term.cause)
        await self._publish_rewound(None)

    async def _rewind(self, orders: Orders) -> None:
        """Rewind to the ordered version, if its weights still exist. An order is handled once."""
        self.term.handle_orders(orders.num_rewinds)
        version = orders.rewind_version
        if not await load_version(version, self.writer.trained, self.writer.store, self.publication.policies):
            return
        self.term.rewind(version, await self.queue.allocate_version(self.term.policy_version + 1))
        await self._publish_rewound(version)

    async def _publish_rewound(self, parent_version: int | None) -> None:
        """Publish weights that no step of this term has made, and wait until the servers have them: the next step's
        version could replace this one, whose record says where the weights came from."""
        staged = await self.publication.stage(self.term.policy_version, parent_version=parent_version)
        await self.publication.publish(staged, self.term.step, {})
        await self.publication.wait_until_published()

    async def _batch_unless_interrupted(self, ahead: BatchAhead) -> Batch | None:
        """The batch, or None if the operator orders a stop or a rewind before it is complete. Groups that no checkpoint
        covers stay in Redis, and producers may be waiting for their memory. So if the batch takes long, a checkpoint is
        made early."""
        ahead.wanted.set()
        await self.orders.wait_for_either(ahead.reading, self.config.learner.batch_timeout_s * STARVED_SHARE)
        is_interrupted = self.orders.stopping.is_set() or self.orders.rewind_ordered.is_set()
        if not ahead.reading.done() and not is_interrupted:
            await self._checkpoint()
            await self.writer.wait_until_written()
            await self.orders.wait_for_either(ahead.reading, None)  # the reader has a deadline
        return ahead.reading.result() if ahead.reading.done() else None

    async def _train(self, batch: Batch, forwards: asyncio.Task[SequenceBatch]) -> StepResult:
        """Train on the batch. Afterwards the policy's ranks hold the new weights, which are not published yet."""
        bind(step=batch.step, policy_version=self.term.policy_version)
        started_s = time.time()
        async with profiled(self.config, self.training.roles, batch.step):
            result = await self.training.run(batch.groups, batch.step, self.term, forwards)
        self.agreement.check.remember(result.update.logprob_mismatch)
        if result.recomputed is not None:
            await self.recomputed.keep(batch.groups, result.recomputed)
        self.term.add_trained(batch.step, batch.prompt_ids, result.update.kl_reference, result.batch.num_sequences)
        self.records.trace(batch, started_s, self.term)
        return result

    async def _publish(
        self, batch: Batch, result: StepResult, started: float, before_s: tuple[float, float, float]
    ) -> float:
        """Give the new weights a version, bring it to the servers, and record the step, whose first times are given.
        Returns when the step ended."""
        version = await self.queue.allocate_version(self.term.policy_version + 1)
        self.term.advance(version)
        stage_started = time.monotonic()
        staged = await self.publication.stage(version, batch.trace_parents)
        ended = time.monotonic()
        times = StepTimes(*before_s, ended - stage_started, ended - started, self.publication.computed_s)
        metrics = flattened(result, times, version, self.publication.in_flight_updates)
        metrics |= await self.records.usage_numbers(result)
        throughput = self.training.access.throughput
        throughput.add_generation((await self.publication.followers.view.current()).servers, batch.groups)
        metrics |= throughput.rates() | self.publication.push_rate
        await self.records.record(batch, result, metrics, self.term, self.loggers)
        self.samples.add(TrainedStep(batch.step, version, batch.groups, batch.prompts, result.rewards))
        await self.publication.publish(staged, batch.step, self.agreement.check.last | metrics)
        return ended

    async def _checkpoint(self) -> None:
        """Begin a checkpoint of everything trained so far. Its groups are acknowledged once it is durable."""
        if not self.term.uncommitted:
            return
        state = self.term.trainer_state({name: feed.position for name, feed in (await self.queue.feeds()).items()})
        await self.writer.begin(state, self.term.take_uncommitted())


@contextlib.asynccontextmanager
async def profiled(config: RunConfig, roles: Mapping[str, RoleGroup], step: int) -> AsyncIterator[None]:
    """If the step is to be profiled, have the configured ranks of every role record what they do in the `async with`
    block. A step that fails writes no trace of torch."""
    profile = config.learner.profile
    if step not in profile.steps:
        yield
        return
    ranks = [(role, rank) for role in roles.values() for rank in profile.ranks if rank < role.num_ranks]
    await gather_all(*(role.call_rank(rank, "start_profile", step) for role, rank in ranks))
    yield
    folder = profiles_folder(config)
    await gather_all(*(role.call_rank(rank, "write_profile", folder, step) for role, rank in ranks))


async def repeat_lost_commits(queue: GroupConsumer, term: Term) -> None:
    """Commit again what Redis has lost in a crash, after a checkpoint that covers the whole ledger. While the learner
    trains, the reader does that for each such group that it takes. Groups never taken would stay in the queue."""
    lost = term.ledger.absent_from((await queue.committed()).trained)
    if lost:
        logger.warning("Redis has lost the commits of %d groups; they are committed again", len(lost))
        await queue.commit(term.step, lost)


@dataclass(frozen=True)
class OperatorOrders:
    """The operator's orders for one term: to stop, and to rewind. `watch` runs during training and sets the events."""

    control: RunControl
    term: Term
    stopping: asyncio.Event
    """Set to end the learner after the running step. A signal handler may set it too."""
    rewind_ordered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be an order to rewind that was not followed yet."""

    async def watch(self) -> None:
        """Runs forever. A stop order names a term: it stops the learner of that term and of earlier ones."""
        while True:
            await asyncio.sleep(POLL_S)
            orders = await self.control.orders()
            if not self.stopping.is_set() and orders.stop_term >= self.term.number:
                logger.info("the operator has ordered a stop: ending after this step, with a checkpoint")
                self.stopping.set()
            if orders.num_rewinds > self.term.num_orders:
                self.rewind_ordered.set()

    async def new_rewind(self) -> Orders | None:
        self.rewind_ordered.clear()
        orders = await self.control.orders()
        if orders.num_rewinds < self.term.num_orders:
            # Redis has lost orders, or an older build counted them under another name. The next one is new.
            self.term.handle_orders(orders.num_rewinds)
        return orders if orders.num_rewinds > self.term.num_orders else None

    async def wait_for_either(self, task: asyncio.Task[object], timeout_s: float | None) -> None:
        """Wait until the task has ended, an order has come, or `timeout_s` have passed."""
        events = [asyncio.create_task(event.wait()) for event in (self.stopping, self.rewind_ordered)]
        await asyncio.wait({task, *events}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()


class StepRecords:
    """Records every step of a learner process, through all its terms."""

    def __init__(
        self, config: LearnerConfig, policy: RoleGroup, metrics: LearnerMetrics, tracing: Tracing,
        silence_s: float | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.policy = policy
        self.metrics = metrics
        self.tracing = tracing
        self.recovering_since = None if silence_s is None else time.monotonic() - silence_s
        """When the learner that crashed before this one was last alive. None after the first step."""
        self.num_gpus = num_gpus(config.placement, config.needed_roles)
        self.usage: list[RankUsage] = []
        self.usage_at = -USAGE_EVERY_S

    def trace(self, batch: Batch, started_s: float, term: Term) -> None:
        """Record for each traced group how long it waited for its step, and the step."""
        ended_s = time.time()
        for group in batch.groups if batch.trace_parents else ():
            self.tracing.record("queue", group.trace_parent, group.finished_at_ms / 1000, started_s)
            staleness = max(0, term.policy_version - term.oldest_version(group))
            fields = {"step": batch.step, "policy_version": term.policy_version, "staleness": staleness}
            self.tracing.record("train", group.trace_parent, started_s, ended_s, **fields)

    async def record(
        self, batch: Batch, result: StepResult, metrics: Mapping[str, float], term: Term, loggers: StepLoggers
    ) -> None:
        """Record one step, which made the term's version. `metrics` are all its numbers by name."""
        loggers.log(metrics)
        self.metrics.record_step(metrics, mean_rewards(batch.groups, result.rewards))
        if self.recovering_since is not None:
            self.metrics.recovery_seconds.labels("learner").observe(time.monotonic() - self.recovering_since)
            self.recovering_since = None
        trained_version = term.policy_version - 1
        oldest = [term.oldest_version(group) for group in batch.groups]
        self.metrics.staleness.observe_all([max(0.0, trained_version - version) for version in oldest])
        logger.info(
            "step %d version %d reward %.3f staleness %.2f loss %.4f %.2fs", result.step, term.policy_version,
            result.batch.reward_mean, result.batch.staleness_mean, result.update.loss, metrics["step_s"],
        )  # fmt: skip

    async def usage_numbers(self, result: StepResult) -> dict[str, float]:
        """Memory of the policy's ranks, the learner's GPUs, and the share of their FLOPs that the update used, if these
        are known."""
        if time.monotonic() - self.usage_at >= USAGE_EVERY_S:
            self.usage = await self.policy.call_all("usage")
            self.usage_at = time.monotonic()
        for rank, usage in enumerate(self.usage):
            self.metrics.memory_peak.labels(rank).set(usage.memory_peak_bytes)
        peak = sum(peak_flops(usage.device_name, self.config.peak_flops_per_rank) for usage in self.usage)
        num_tokens: float = (result.batch.prompt_tokens + result.batch.response_tokens) * self.config.epochs_per_step
        num_tokens -= result.update.shared_tokens
        share = mfu(self.usage[0].num_parameters, num_tokens, result.update_s, peak)
        self.metrics.mfu.set(share)
        fullest = {
            "memory_peak_gib": max(usage.memory_peak_bytes for usage in self.usage) / 2**30,
            "memory_reserved_gib": max(usage.memory_reserved_bytes for usage in self.usage) / 2**30,
            "host_memory_gib": max(usage.host_memory_bytes for usage in self.usage) / 2**30,
        }
        known = {name: gib for name, gib in fullest.items() if gib}
        return known | {"num_gpus": float(self.num_gpus)} | ({"mfu": share} if peak else {})


@dataclass(eq=False)
class CheckpointWriter:
    """Writes the checkpoints of one term, one at a time. Training waits while the ranks copy their shards, but not for
    the files: shards, ledger and step are copied at the same moment.

        stage (training waits) ─► ranks write ─► flush and rename ─► upload ─► acknowledge
                                  └──────────────── during the next steps ───────────────┘

    `on_durable` is called when a checkpoint is durable."""

    store: CheckpointStore
    queue: GroupConsumer
    trained: Mapping[str, RoleGroup]
    metrics: LearnerMetrics
    term: Term
    on_durable: Callable[[], None]
    _writing: asyncio.Task[None] | None = None

    async def begin(self, state: TrainerState, prompt_ids: Sequence[int]) -> None:
        """Copy the shards, then write the files in a task while training continues. `prompt_ids` were trained since the
        last checkpoint."""
        await self.wait_until_written()
        started = time.monotonic()
        partial = await asyncio.to_thread(self.store.partial_folder, state.step, state.term)
        with self.store.writing(partial):
            staging = (role.call_all("stage", shards_folder(partial, name)) for name, role in self.trained.items())
            await gather_all(*staging)
        self._writing = asyncio.create_task(self._write(state, list(prompt_ids), started))

    async def wait_until_written(self) -> None:
        """Wait until the checkpoint that is being written, if any, is durable and acknowledged. Raises its error."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def raise_if_failed(self) -> None:
        """Raise the error of a checkpoint that failed. Called between steps, so that a failure is noticed soon."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self) -> None:
        if self._writing is not None:
            self.store.abandon_upload()
            await end_task(self._writing)

    async def _write(self, state: TrainerState, prompt_ids: list[int], started: float) -> None:
        partial = self.store.partial_path(state.step, state.term)
        with self.store.writing(partial):
            saving = (role.call_all_in_lane(SAVE_LANE, "finish_saving") for role in self.trained.values())
            written = dict(zip(self.trained, await gather_all(*saving), strict=True))
        crash_point("before_flush")
        checkpoint = await asyncio.to_thread(self.store.finish, partial, state, _shards(partial, written))
        await asyncio.to_thread(self.store.upload, checkpoint)
        self.term.ledger.mark_durable(prompt_ids)
        self.on_durable()
        crash_point("after_flush")
        await self.queue.commit(state.step, prompt_ids, await asyncio.to_thread(self.store.oldest_step))
        crash_point("after_commit")
        self.metrics.checkpoint_seconds.observe(time.monotonic() - started)
        self.metrics.checkpoint_success.set_to_current_time()


def _shards(partial: Path, written: Mapping[str, Sequence[Mapping[str, FileRecord]]]) -> dict[str, FileRecord]:
    """The files of all ranks by their paths in the checkpoint. `written` has each rank's files by name, by role."""
    return {
        str((shards_folder(partial, role) / name).relative_to(partial)): record
        for role, ranks in written.items()
        for files in ranks
        for name, record in files.items()
    }
