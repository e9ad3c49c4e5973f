"""The learner controller: one loop from ready groups to a published version.

    read batch ─► reference and proximal log-probs ─► advantages ─► update ─► gather ─► publish ┐
        ▲  (the next batch is read while this one trains)       (the push runs beside the next  │
        │                                                         step's forward and update)    │
        └──────────── every N steps: checkpoint ─► commit (acknowledge) ◄───────────────────────┘

Exactly once: a group is acknowledged only when a durable checkpoint's ledger holds its prompt; every call to the queue
carries this learner's term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.cancellation import end_task
from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.fleet import Fleet
from penstock.replay.contract import GroupConsumer
from penstock_learner.advantage_step import denominators_of, with_advantages
from penstock_learner.algorithms.kl import make_kl_controller
from penstock_learner.batch_reader import Batch, BatchReader
from penstock_learner.checkpoint import CheckpointStore, TrainerState
from penstock_learner.crash_points import crash_point
from penstock_learner.logprob_check import LogProbCheck
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.packing import SequenceBatch, batch_of, partition, unpermute
from penstock_learner.policy_publication import PolicyPublication
from penstock_learner.role_group import RoleGroup
from penstock_learner.step_metrics import MetricsFile, batch_metrics, update_metrics

logger = logging.getLogger(__name__)
STARVED_SHARE = 0.25
"""Of a batch's deadline: after so long without one, groups are acknowledged early."""


def needed_roles(config: RunConfig) -> dict[str, RoleConfig]:
    """The roles that the algorithm of this run uses."""
    roles = {"policy": config.learner.policy}
    if config.learner.algorithm.kl.placement != "none":
        roles["reference"] = config.learner.reference
    return roles


class LearnerController:
    """Runs one learner from a term to its last step. Knows nothing of placements or transports."""

    def __init__(
        self, config: RunConfig, queue: GroupConsumer, fleet: Fleet, roles: Mapping[str, RoleGroup],
        metrics: LearnerMetrics,
    ) -> None:  # fmt: skip
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.roles = roles
        self.policy = roles["policy"]
        self.metrics = metrics
        self.checkpoints = CheckpointStore(config.folder / "checkpoints", config.learner.checkpoint.keep)
        self.log_probs = LogProbCheck(config.learner.max_logprob_mismatch_nats)
        self.stopping = asyncio.Event()
        """Set it to stop after the running step, with a checkpoint."""

    async def run(self) -> None:
        """Train until the last step, or until `stopping`."""
        state = await self._resume()
        self.ledger = state.make_ledger()
        self.uncommitted: list[int] = []
        self.kl = make_kl_controller(self.config.learner.algorithm.kl, state.kl_coefficient)
        manifests = await self._take_over(state)
        reader = BatchReader(self.queue, self.config.replay, self.config.learner, self.ledger, manifests)
        self.publication = PolicyPublication(self.config, self.queue, self.fleet, self.policy, self.term, self.metrics)
        self.file = MetricsFile(self.config.folder / "metrics.jsonl", state.step)
        publishing = [
            asyncio.create_task(self.publication.publish_loop()),
            asyncio.create_task(self.publication.catch_up_loop()),
        ]
        training = asyncio.create_task(self._train(reader, state))
        try:
            done, _ = await asyncio.wait({*publishing, training}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (training, *publishing):
                await end_task(task)
            self.file.close()

    async def _resume(self) -> TrainerState:
        """Start the roles, from the newest checkpoint where there is one."""
        found = self.checkpoints.newest() if self.config.learner.checkpoint.resume == "auto" else None
        await asyncio.gather(*(role.start() for role in self.roles.values()))
        if found is None:
            return TrainerState()
        path, state = found
        logger.info("resuming from %s", path)
        await self.policy.call_all("restore", path)
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
        reading: asyncio.Task[Batch] | None = None
        try:
            while not self.stopping.is_set() and (num_steps == 0 or step < num_steps):
                step += 1
                started = time.monotonic()
                reading = reading or asyncio.create_task(reader.read(step, version))
                batch = await self._batch_or_stop(reading, step - 1, version)
                wait_s = time.monotonic() - started
                if batch is None:
                    step -= 1
                    break
                crash_point("after_read")
                is_last = step == num_steps
                reading = None if is_last else asyncio.create_task(reader.read(step + 1, version + 1))
                metrics = {"wait_s": wait_s} | await self._step(batch, step, version)
                crash_point("mid_step")
                version = await self.queue.allocate_version(version + 1)
                gather_started = time.monotonic()
                offer = await self.publication.gather(version, step)
                metrics |= {"gather_s": time.monotonic() - gather_started}
                metrics |= {"step_s": time.monotonic() - started, "policy_version": float(version)}
                self._record(metrics, batch)
                offer.metrics.set_result(metrics)
                if step % every == 0:
                    await self._checkpoint(step, version)
            if self.stopping.is_set():
                await self._checkpoint(step, version)  # whoever asked may not wait for a push as well
            await self.publication.settle()
            await self._checkpoint(step, version)
        finally:
            if reading is not None:
                await end_task(reading)

    async def _batch_or_stop(self, reading: asyncio.Task[Batch], trained_step: int, version: int) -> Batch | None:
        """The batch, or None when the learner is asked to stop while it waits.

        Groups that no checkpoint covers stay in Redis, where producers may be waiting for their memory. So when none
        comes for long, a checkpoint is made before its time."""
        batch = await self._or_stop(reading, self.config.learner.batch_timeout_s * STARVED_SHARE)
        if batch is None and not self.stopping.is_set():
            await self._checkpoint(trained_step, version)
            batch = await self._or_stop(reading, None)
        return batch

    async def _or_stop(self, reading: asyncio.Task[Batch], timeout_s: float | None) -> Batch | None:
        stop = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({reading, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return reading.result() if reading.done() else None

    async def _step(self, batch: Batch, step: int, version: int) -> dict[str, float]:
        """Train on a batch; the policy holds the new weights afterwards, unpublished."""
        sequences = batch_of(batch.groups)
        metrics = {"step": float(step)} | batch_metrics(sequences, version)
        forward_started = time.monotonic()
        sequences = await self._with_forwards(sequences)
        sequences = with_advantages(sequences, self.config.learner.algorithm, self.kl.coefficient)
        update_started = time.monotonic()
        shards = partition(sequences, self.policy.num_ranks, self.config.learner.micro_batch_tokens)
        denominators = denominators_of(sequences, self.config.learner.algorithm)
        reports = await self.policy.call_each(
            "update", [(shard, denominators, step, version, self.kl.coefficient) for shard in shards]
        )
        metrics |= update_metrics(reports, denominators)
        self.log_probs.check(metrics, batch.groups)
        self.kl = self.kl.updated(metrics["kl_reference"], sequences.num_sequences)
        self.ledger.add(batch.prompt_ids)
        self.uncommitted += batch.prompt_ids
        return metrics | {
            "forward_s": update_started - forward_started,
            "update_s": time.monotonic() - update_started,
            "time": time.time(),
        }

    async def _with_forwards(self, batch: SequenceBatch) -> SequenceBatch:
        """Log-probs of the reference and, where the correction wants it, of the proximal policy; at the same time."""
        correction = self.config.learner.algorithm.correction
        wanted = {}
        if "reference" in self.roles:
            wanted["reference_log_probs"] = self.roles["reference"]
        if correction.mode != "bypass" and correction.proximal == "recomputed":
            wanted["old_log_probs"] = self.policy
        results = await asyncio.gather(*(self._log_probs(role, batch) for role in wanted.values()))
        computed: dict[str, Any] = dict(zip(wanted, results, strict=True))
        return replace(batch, **computed)

    async def _log_probs(self, role: RoleGroup, batch: SequenceBatch) -> NDArray[np.float32]:
        shards = partition(batch, role.num_ranks, self.config.learner.micro_batch_tokens)
        parts = await role.call_each("log_probs", [(shard,) for shard in shards])
        return unpermute(parts, shards, batch)

    def _record(self, metrics: dict[str, float], batch: Batch) -> None:
        metrics["tokens_per_second"] = metrics["response_tokens"] / metrics["step_s"]
        metrics["in_flight_updates"] = float(self.publication.in_flight_updates)
        self.file.write(metrics)
        self.metrics.record_step(metrics, batch.groups[0].data_source)
        for group in batch.groups:
            self.metrics.staleness.observe(max(0.0, metrics["policy_version"] - 1 - group.min_version))
        logger.info(
            "step %d version %d reward %.3f staleness %.2f loss %.4f %.2fs",
            metrics["step"], metrics["policy_version"], metrics["reward_mean"], metrics["staleness_mean"],
            metrics["loss"], metrics["step_s"],
        )  # fmt: skip

    async def _checkpoint(self, step: int, version: int) -> None:
        """Make everything up to `step` durable, then acknowledge it."""
        if not self.uncommitted:
            return
        started = time.monotonic()
        partial = self.checkpoints.partial_folder(step, self.term)
        await self.policy.call_all("save", partial)
        crash_point("before_flush")
        state = TrainerState(
            step,
            version,
            self.term,
            self.ledger.ranges,
            self.kl.coefficient,
            feed_positions=await self.queue.feed_positions(),
            store_id=self.store_id,
        )
        self.checkpoints.finish(partial, state)
        self.ledger.mark_durable()
        crash_point("after_flush")
        await self.queue.commit(step, self.uncommitted)
        crash_point("after_commit")
        self.uncommitted = []
        self.metrics.checkpoint_seconds.observe(time.monotonic() - started)
        self.metrics.checkpoint_success.set_to_current_time()
