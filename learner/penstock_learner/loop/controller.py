"""The learner controller: one loop from ready groups to a published version.

    read batch ─► training step (training_step.py) ─► gather ─► publish ┐
        ▲  (the next batch is read,      (the push runs beside the next │
        │   scored and compared with      step's forward and update)    │
        │   the reference meanwhile)                                    │
        └──────── every N steps: checkpoint ─► commit (acknowledge) ◄───┘

Exactly once: a group is acknowledged only when a durable checkpoint's ledger holds its prompt; every call to the queue
carries this learner's term.

A roll back is followed between two steps (roll_back.py): the weights of the older version get a number of their own.

When a role that trains dies, its ranks are started anew and all that train go back to the checkpoint, under a new term,
as a new learner process would; the roles that live stay up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import RoleDied
from penstock.logs import bind
from penstock.replay.contract import GroupConsumer
from penstock.replay.recomputed import RecomputedLogProbs
from penstock.store.fleet import Fleet
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import Orders, RunControl
from penstock.tracing import Tracing
from penstock_learner.algorithms.kl import make_kl_controller
from penstock_learner.crash_points import crash_point
from penstock_learner.loggers.opening import open_loggers
from penstock_learner.loop.batch_ahead import BatchAhead
from penstock_learner.loop.batch_reader import Batch, BatchReader
from penstock_learner.loop.checkpoint import CheckpointStore, TrainerState, shards_folder
from penstock_learner.loop.checkpoint_writer import CheckpointWriter
from penstock_learner.loop.logprob_check import LogProbCheck
from penstock_learner.loop.policy_publication import PolicyPublication
from penstock_learner.loop.roll_back import RollBack, load_version, oldest_version
from penstock_learner.loop.skipped_steps import SkippedSteps
from penstock_learner.loop.step_metrics import mean_rewards
from penstock_learner.loop.training_step import TRAINED_ROLES, Computed, TrainingStep
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.model.utilisation import RankUsage, mfu, peak_flops
from penstock_learner.profiling import StepProfiles
from penstock_learner.roles.placement import LANES
from penstock_learner.roles.role_group import RoleGroup, all_ended
from penstock_learner.roles.role_recovery import RoleRecovery

logger = logging.getLogger(__name__)
ORDERS_S = 0.5
STARVED_SHARE = 0.25
"""Of a batch's deadline: after so long without one, groups are acknowledged early."""
USE_EVERY_S = 5.0
"""How often the ranks are asked for their memory: each time is a call between two steps."""


class LearnerController:
    """Runs one learner from a term to its last step. Knows nothing of placements or transports."""

    def __init__(
        self, config: RunConfig, queue: GroupConsumer, fleet: Fleet, roles: Mapping[str, RoleGroup],
        metrics: LearnerMetrics, silence_s: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.roles = roles
        self.trained = {name: roles[name] for name in TRAINED_ROLES if name in roles}
        self.policy = roles["policy"]
        self.metrics = metrics
        self.recovery = RoleRecovery(config.learner.max_role_restarts, metrics)
        skipped = SkippedSteps(config.learner.max_skipped_steps, config.folder / "nonfinite")
        self.training = TrainingStep(config.learner, roles, self.recovery, metrics, skipped)
        self.profiles = StepProfiles(config, roles)
        self.checkpoints = CheckpointStore(config.folder / "checkpoints", config.learner.checkpoint.keep)
        self.log_probs = LogProbCheck(config.learner.max_logprob_mismatch_nats)
        self.recovering_since = None if silence_s is None else time.monotonic() - silence_s
        """When a learner that crashed gave its last sign of life, until the first step after it."""
        self.tracing = tracing or Tracing()
        self.use: list[RankUsage] = []
        self.use_at = -USE_EVERY_S
        self.stopping = asyncio.Event()
        """Set it to stop after the running step, with a checkpoint."""
        self.may_resume = config.learner.checkpoint.resume != "off"
        """Whether the newest checkpoint is one to continue from."""
        self.control = RunControl(fleet.client, config.run)
        self.told = asyncio.Event()
        """Set while a roll back is to be followed."""

    async def run(self) -> None:
        """Train until the last step, or until `stopping`, through the deaths of roles."""
        died: RoleDied | None = None
        while True:
            try:
                await self._start_roles(died)
                await self._train_from_checkpoint()
                return
            except RoleDied as error:
                died = error

    async def _start_roles(self, died: RoleDied | None) -> None:
        """All of them, at first; afterwards the one that died and, with no checkpoint to go back to, all that train."""
        if died is None:
            await all_ended(*(self.recovery.start(role) for role in self.roles.values()))
            return
        anew = {died.role} if self._checkpoint_to_resume() else {died.role, *self.trained}
        # A restart that this death broke off is begun again, and not counted again.
        half_started = [role for name, role in self.roles.items() if name not in anew and not role.is_up]
        await all_ended(
            *(self.recovery.restart(self.roles[name], died) for name in anew),
            *(self.recovery.start(role) for role in half_started),
        )
        if "policy" not in anew:
            for lane in LANES:
                # What it was pushing would meet the pushes of the new term.
                await self.policy.call_beside(lane, "wait_idle", timeout_s=self.config.learner.rank_timeout_s)

    async def _train_from_checkpoint(self) -> None:
        state = await self._resume()
        self.ledger = state.make_ledger()
        self.uncommitted: list[int] = []
        self.kl = make_kl_controller(self.config.learner.algorithm.kl, state.kl_coefficient)
        self.resumed_from = state.resumed_from
        self.num_roll_backs = state.num_roll_backs
        self.roll_backs = [RollBack(*versions) for versions in state.roll_backs]
        self.writer = CheckpointWriter(
            self.checkpoints, self.queue, self.trained, self.ledger, self.metrics, self._made_progress
        )
        manifests = await self._take_over(state)
        reader = BatchReader(
            self.queue, self.config.replay, self.config.learner, self.ledger, manifests, self.roll_backs
        )
        self.publication = PolicyPublication(
            self.config, self.queue, self.fleet, self.policy, self.term, self.metrics, self.tracing
        )
        self.loggers = open_loggers(self.config, state.step)
        publishing = [
            asyncio.create_task(self.publication.publish_loop()),
            asyncio.create_task(self.publication.catch_up_loop()),
            asyncio.create_task(self._follow_orders()),
        ]
        training = asyncio.create_task(self._train(reader, state))
        try:
            done, _ = await asyncio.wait({*publishing, training}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (training, *publishing):
                await end_task(task)
            await self.writer.abandon()
            await asyncio.to_thread(self.loggers.close)

    async def _follow_orders(self) -> None:
        """For ever: an operator may stop this learner, and those before it, or roll the policy back."""
        while True:
            await asyncio.sleep(ORDERS_S)
            orders = await self.control.orders()
            if not self.stopping.is_set() and orders.stop_term >= self.term:
                logger.info("told to stop: ending after this step, with a checkpoint")
                self.stopping.set()
            if orders.roll_backs > self.num_roll_backs:
                self.told.set()

    def _checkpoint_to_resume(self) -> tuple[Path, TrainerState] | None:
        return self.checkpoints.to_resume(self.config.learner.checkpoint.resume) if self.may_resume else None

    async def _resume(self) -> TrainerState:
        """Bring the roles that train to the newest checkpoint, where there is one; else they are as they started."""
        found = self._checkpoint_to_resume()
        if found is None:
            return TrainerState()
        path, state = found
        logger.info("resuming from %s", path)
        await all_ended(*(role.call_all("restore", shards_folder(path, name)) for name, role in self.trained.items()))
        return state

    async def _take_over(self, state: TrainerState) -> dict[int, list[int]]:
        """Fence every earlier learner, acknowledge what the checkpoint covers, and get the open batches back."""
        self.store_id = await self.queue.store_id()
        state.check_store(self.store_id)
        self.term = await self.queue.take_term(state.term)
        # A term that Redis could still lose must not be acted under: the one before would hold again.
        await asyncio.sleep(self.config.replay.settle_s)
        manifests = await self.queue.restore(state.step)
        covered = [p for step, ids in manifests.items() if step <= state.step for p in ids if p in self.ledger]
        if covered:
            await self.queue.commit(state.step, covered)
        return {step: ids for step, ids in manifests.items() if step > state.step}

    async def _publish_start(self, state: TrainerState) -> int:
        """Version 0 is the model folder that servers load themselves; a resumed policy gets a number of its own."""
        was_published = (await self.queue.stat()).policy_version > 0
        is_new = state.step == 0 and not was_published
        version = 0 if is_new else await self.queue.allocate_version(state.policy_version + 1)
        offer = await self.publication.gather(version, state.step)
        offer.metrics.set_result({})
        await self.publication.settle()
        return version

    async def _train(self, reader: BatchReader, state: TrainerState) -> None:
        num_steps = self.config.learner.num_steps
        every = self.config.learner.checkpoint.every_steps
        step = state.step
        version = await self._publish_start(state)
        current: BatchAhead | None = None
        ahead: BatchAhead | None = None
        try:
            while not self.stopping.is_set() and (num_steps == 0 or step < num_steps):
                self.told.clear()
                if (orders := await self.control.orders()).roll_backs > self.num_roll_backs:
                    version = await self._roll_back(orders, step, version)
                    ahead = ahead and ahead.again(reader, self.training, version)
                step += 1
                started = time.monotonic()
                current = ahead = ahead or BatchAhead.begin(reader, self.training, step, version)
                batch = await self._batch_or_order(current, step - 1, version)
                if batch is None:
                    step -= 1
                    continue
                wait_s = time.monotonic() - started
                crash_point("after_read")
                is_last = step == num_steps
                ahead = None if is_last else BatchAhead.begin(reader, self.training, step + 1, version + 1)
                bind(step=step, policy_version=version)
                step_started_s = time.time()
                metrics = {"wait_s": wait_s} | await self._step(batch, current.forwards, step, version)
                self._trace(batch, step_started_s, step, version)
                crash_point("mid_step")
                version = await self.queue.allocate_version(version + 1)
                gather_started = time.monotonic()
                offer = await self.publication.gather(version, step, batch.trace_parents)
                metrics |= {"gather_s": time.monotonic() - gather_started}
                metrics |= {"step_s": time.monotonic() - started, "policy_version": float(version)}
                self._record(metrics, batch)
                await self._observe_use(metrics)
                offer.metrics.set_result(self.log_probs.last | metrics)
                self.writer.raise_if_failed()
                if step % every == 0:
                    await self._checkpoint(step, version)
            if self.stopping.is_set():
                await self._checkpoint(step, version)  # whoever asked may not wait for a push as well
            await self.publication.settle()
            await self._checkpoint(step, version)
            await self.writer.settle()
        finally:
            for unused in (current, ahead):
                if unused is not None:
                    await unused.end()

    async def _roll_back(self, orders: Orders, step: int, version: int) -> int:
        """Follow the order, once, if anything of its version is left. Returns the version of the weights."""
        self.num_roll_backs = orders.roll_backs
        policies = PolicyRegistry(self.fleet.client, self.config.run)
        if not await load_version(orders.roll_back_version, self.trained, self.checkpoints, policies):
            return version
        version = await self.queue.allocate_version(version + 1)
        self.roll_backs.append(RollBack(orders.roll_back_version, version))
        offer = await self.publication.gather(version, step, parent_version=orders.roll_back_version)
        offer.metrics.set_result({})
        await self.publication.settle()  # or the next step's version would take its place, and hide where it began
        return version

    async def _batch_or_order(self, ahead: BatchAhead, trained_step: int, version: int) -> Batch | None:
        """The batch, or None when the learner is asked to stop, or to roll back, while it waits.

        Groups that no checkpoint covers stay in Redis, where producers may be waiting for their memory. So when none
        comes for long, a checkpoint is made before its time."""
        ahead.wanted.set()
        batch = await self._or_order(ahead.reading, self.config.learner.batch_timeout_s * STARVED_SHARE)
        if batch is None and not self.stopping.is_set() and not self.told.is_set():
            await self._checkpoint(trained_step, version)
            await self.writer.settle()
            batch = await self._or_order(ahead.reading, None)
        return batch

    async def _or_order(self, reading: asyncio.Task[Batch], timeout_s: float | None) -> Batch | None:
        orders = [asyncio.create_task(event.wait()) for event in (self.stopping, self.told)]
        await asyncio.wait({reading, *orders}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for order in orders:
            order.cancel()
        return reading.result() if reading.done() else None

    async def _step(self, batch: Batch, forwards: asyncio.Task[Computed], step: int, version: int) -> dict[str, float]:
        """Train on a batch; the policy holds the new weights afterwards, unpublished."""
        async with self.profiles.of_step(step):
            metrics = await self.training.run(
                batch.groups, step, version, self.kl.coefficient, forwards, self.roll_backs
            )
        self.log_probs.check(metrics, batch.groups)
        if self.training.recomputed is not None:
            await RecomputedLogProbs(self.fleet.client, self.config.run).keep(batch.groups, self.training.recomputed)
        self.kl = self.kl.updated(metrics["kl_reference"], int(metrics["num_sequences"]))
        self.ledger.add(batch.prompt_ids)
        self.uncommitted += batch.prompt_ids
        return metrics

    def _trace(self, batch: Batch, started_s: float, step: int, version: int) -> None:
        """The time that each group waited for its step, and the step."""
        ended_s = time.time()
        for group in batch.groups if batch.trace_parents else ():
            self.tracing.record("queue", group.trace_parent, group.finished_at_ms / 1000, started_s)
            staleness = version - oldest_version(group, self.roll_backs)
            fields = {"step": step, "policy_version": version, "staleness": staleness}
            self.tracing.record("train", group.trace_parent, started_s, ended_s, **fields)

    def _record(self, metrics: dict[str, float], batch: Batch) -> None:
        metrics["tokens_per_second"] = metrics["response_tokens"] / metrics["step_s"]
        metrics["in_flight_updates"] = float(self.publication.in_flight_updates)
        self.loggers.log(metrics)
        self.metrics.record_step(metrics, mean_rewards(batch.groups, self.training.rewards))
        if self.recovering_since is not None:
            self.metrics.recovery_seconds.labels("learner").observe(time.monotonic() - self.recovering_since)
            self.recovering_since = None
        trained_version = metrics["policy_version"] - 1
        oldest = [oldest_version(group, self.roll_backs) for group in batch.groups]
        self.metrics.staleness.observe_all([max(0.0, trained_version - version) for version in oldest])
        logger.info(
            "step %d version %d reward %.3f staleness %.2f loss %.4f %.2fs",
            metrics["step"], metrics["policy_version"], metrics["reward_mean"], metrics["staleness_mean"],
            metrics["loss"], metrics["step_s"],
        )  # fmt: skip

    async def _observe_use(self, metrics: Mapping[str, float]) -> None:
        """Memory of the policy's ranks, and how much of their FLOPs the update used."""
        if time.monotonic() - self.use_at >= USE_EVERY_S:
            self.use = await self.policy.call_all("usage")
            self.use_at = time.monotonic()
        for rank, use in enumerate(self.use):
            self.metrics.memory_peak.labels(rank).set(use.memory_peak_bytes)
        peak = sum(peak_flops(use.device_name, self.config.learner.peak_flops_per_rank) for use in self.use)
        num_tokens = (metrics["prompt_tokens"] + metrics["response_tokens"]) * self.config.learner.epochs_per_step
        self.metrics.mfu.set(mfu(self.use[0].num_parameters, num_tokens, metrics["update_s"], peak))

    async def _checkpoint(self, step: int, version: int) -> None:
        """Begin to make everything up to `step` durable; it is acknowledged once it is."""
        if not self.uncommitted:
            return
        state = TrainerState(
            step,
            version,
            self.term,
            self.ledger.ranges,
            self.kl.coefficient,
            feed_positions=await self.queue.feed_positions(),
            store_id=self.store_id,
            resumed_from=self.resumed_from,
            num_roll_backs=self.num_roll_backs,
            roll_backs=[(each.policy_version, each.new_version) for each in self.roll_backs],
        )
        covered, self.uncommitted = self.uncommitted, []
        await self.writer.begin(state, covered)

    def _made_progress(self) -> None:
        """A checkpoint of this process is durable: from now on there is one to go back to."""
        self.may_resume = True
        self.recovery.made_progress()
