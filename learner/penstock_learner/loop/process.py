"""The learner controller: starts the roles, and trains one term after another until the run is done.

    run ─► choose a checkpoint ─► start roles ─► take a term ─► load the checkpoint ─► steps (step_loop.py) ─► end
              ▲                                 (take_over.py)                           │
              └──────────────────────── a role that trains has died ◄────────────────────┘

When a role that trains dies, its ranks are started again and all trained roles rewind to the checkpoint, under a new
term, as a new learner process would. The other roles stay up. A role that only computes forward passes is restarted
within the call (steps/roles.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NoReturn

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import PenstockError, QueueFull, RoleDied, Unavailable
from penstock.machine import DiskWatch, folder_bytes
from penstock.process_endpoint import Readiness
from penstock.replay.queue import GroupConsumer
from penstock.replay.results import RecomputedLogProbs
from penstock.store.fleet import Fleet, Quarantines, RunControl
from penstock.store.heartbeats import LEARNER, Heartbeats, Phases
from penstock.store.notices import Event, Notices
from penstock.store.reports import LAST_VALIDATION
from penstock.tracing import Tracing
from penstock.weights.folder_tensors import vocabulary_size
from penstock_learner.agreement.servers import LogProbCheck, ServerAgreement, ServerQuarantine
from penstock_learner.checkpoints import CheckpointStore, CheckpointUploads, tokenizer_digest
from penstock_learner.loggers.samples import SampleLog
from penstock_learner.loggers.step_loggers import open_loggers
from penstock_learner.loggers.validations import ValidationGroups, ValidationLog
from penstock_learner.loop.batches import BatchReader, DataEnd, FailedRewards
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.loop.step_loop import CheckpointWriter, OperatorOrders, StepLoop, StepRecords
from penstock_learner.loop.take_over import ChosenCheckpoint, choose_checkpoint, load_checkpoint, take_over
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import LANES, RoleGroup, RoleRecovery, gather_all, trained_roles
from penstock_learner.steps.program import TrainingStep
from penstock_learner.steps.step_result import SkippedSteps
from penstock_learner.term import Term

logger = logging.getLogger(__name__)
FORGOTTEN_AFTER_S = 900.0
"""How long a server stays in the list without a heartbeat. Until then, alerts and the doctor name it."""
SERVERS_POLL_S, VALIDATIONS_POLL_S = 10.0, 5.0
"""How often servers that have died, and new scores and samples of validations, are looked for."""


async def repeated(
    work: Callable[[], Awaitable[None]], pause_s: float, what: str,
    errors: tuple[type[PenstockError], ...] = (QueueFull, Unavailable),
) -> NoReturn:  # fmt: skip
    """Do the work again and again. One of these errors is logged, after `what`, and the work is tried again."""
    while True:
        try:
            await work()
        except errors as error:
            logger.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(pause_s)


async def forget_silent_servers(fleet: Fleet, notices: Notices, term: int) -> None:
    """Forget the servers of a run that have been silent for too long, under a learner's term, and record a notice for
    each. Remove the notices of those that are back: a server that comes back joins again."""
    for server_id, silence_s in (await fleet.forget_silent(FORGOTTEN_AFTER_S, term)).items():
        text = (
            f"{server_id} sent no heartbeat for {silence_s / 60:.0f} min and has left the list of servers; read "
            "its log, and start it again if the run needs it"
        )
        logger.warning("%s", text)
        await notices.record(Event("server_lost", server_id, text))
    await notices.remove([Event("server_lost", server.server_id, "") for server in await fleet.servers()])


class LearnerController:
    """Runs one learner process. Knows nothing of placements or transports. `silence_s` is the time since the last
    heartbeat of a learner that crashed before this one, or None."""

    def __init__(
        self, config: RunConfig, queue: GroupConsumer, fleet: Fleet, roles: Mapping[str, RoleGroup],
        metrics: LearnerMetrics, silence_s: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.roles = roles
        self.trained = {name: roles[name] for name in trained_roles(config.learner)}
        self.policy = roles["policy"]
        self.metrics = metrics
        metrics.num_steps.set(config.learner.num_steps)
        self.tracing = tracing or Tracing()
        self.recovery = RoleRecovery(config.learner.max_role_restarts, metrics)
        skipped = SkippedSteps(config.learner.max_skipped_steps, config.folder / "nonfinite")
        self.training = TrainingStep(config.learner, roles, list(self.trained), self.recovery, metrics, skipped)
        self.records = StepRecords(config.learner, self.policy, metrics, self.tracing, silence_s)
        self.checkpoints = CheckpointStore(
            config.folder / "checkpoints", config.learner.checkpoint.keep, CheckpointUploads.of(config, metrics)
        )
        self.disk = DiskWatch(config.folder, "checkpoints and snapshots")
        metrics.disk.follow("run_dir", self.disk)
        self.log_prob_check = LogProbCheck(config.learner.max_logprob_mismatch_nats, config.model.dtype)
        self.control, self.phases = RunControl(fleet.client, config.run), Phases(fleet.client, config.run)
        self.stopping = asyncio.Event()
        """Set it to stop after the running step, with a checkpoint."""
        self.checkpoint_config = config.learner.checkpoint
        """Which checkpoint to continue from. `off` becomes `auto` when this process has written a checkpoint."""
        self._is_training = False

    async def run(self) -> None:
        """Train until the last step, or until `stopping`. Roles that die are started again. The checkpoint is chosen
        before any role starts: adopting ranks fences the controller before this one, and a checkpoint that may not be
        used must raise first. A learner that is stopped before it has a term takes none and adopts no ranks, so it
        fences no one. A learner that was replaced raises Fenced."""
        died: RoleDied | None = None
        self._watch_disk()
        self.checkpoints.tokenizer = await asyncio.to_thread(tokenizer_digest, self.config.model.path)
        while not self.stopping.is_set():
            try:
                await self.phases.enter(LEARNER, f"loading the model into the ranks of {', '.join(self.roles)}")
                chosen = await choose_checkpoint(self.queue, self.checkpoints, self.checkpoint_config)
                await self._start_roles(died, chosen)
                logger.info("the roles are ready")
                if not self.stopping.is_set():
                    await self._raise_if_fenced()
                    await self._run_term(chosen)
                return
            except RoleDied as error:
                died, self._is_training = error, False
                await self._raise_if_fenced()

    def readiness(self) -> Readiness:
        """What `/readyz` says. It is called from another thread."""
        if self.stopping.is_set():
            return Readiness("draining", "ends its step, writes a checkpoint and acknowledges its groups")
        return Readiness("ready") if self._is_training else Readiness("loading", self.phases.newest)

    async def _raise_if_fenced(self) -> None:
        """Raise Fenced if another learner took over: one that was suspended must not take the run back."""
        if self.queue.term:
            await self.queue.commit(0, [])

    async def _start_roles(self, died: RoleDied | None, chosen: ChosenCheckpoint) -> None:
        """Start all roles, or after a death the dead one. Without a checkpoint, all trained roles start again too."""
        has_checkpoint = chosen.checkpoint is not None
        if died is None:
            starting = (
                self._adopt_or_start(role, can_adopt=has_checkpoint or name not in self.trained)
                for name, role in self.roles.items()
            )
            await gather_all(*starting)
            return
        restarted = {died.role} if has_checkpoint else {died.role, *self.trained}
        # This death may have interrupted the restart of another role. It is started again, without being counted twice.
        half_started = [role for name, role in self.roles.items() if name not in restarted and not role.is_up]
        await gather_all(
            *(self.recovery.restart(self.roles[name], died) for name in restarted),
            *(self.recovery.start(role) for role in half_started),
        )
        if "policy" not in restarted:
            for lane in LANES:
                # A push of the old term that still runs would collide with the pushes of the new one.
                await self.policy.call_in_lane(lane, "wait_idle", timeout_s=self.config.learner.rank_timeout_s)

    async def _adopt_or_start(self, role: RoleGroup, *, can_adopt: bool) -> None:
        if can_adopt and await role.adopt():
            logger.info("adopted the ranks of the %s role", role.name)
        else:
            await self.recovery.start(role)

    async def _run_term(self, chosen: ChosenCheckpoint) -> None:
        """Train from the checkpoint on. Concurrent tasks handle publication and the operator's orders."""
        start = "" if chosen.checkpoint is None else f" and loading {chosen.checkpoint.name}"
        await self.phases.enter(LEARNER, f"taking over the run{start}")
        load = partial(load_checkpoint, trained=self.trained)
        loss_window_s, kl = self.config.replay.loss_window_s, self.config.learner.algorithm.kl
        term = await take_over(self.queue, self.checkpoints, self.checkpoint_config, chosen, load, loss_window_s, kl)
        self.metrics.algorithm["step"].set(term.step)
        # A rank answers, because this process would import transformers for it, which takes seconds.
        self.training.share_prefixes(await self.policy.call_rank(0, "prefix_sharing_roles"))
        self._is_training = True
        logger.info("training from step %d under term %d", term.step, term.number)
        orders = OperatorOrders(self.control, term, self.stopping)
        quarantine = ServerQuarantine(Quarantines(self.fleet.client, self.config.run), term.number)
        publication = PolicyPublication(
            self.config, self.queue, self.fleet, self.policy, term.number, self.metrics, self.tracing, quarantine
        )
        steps = self._make_step_loop(term, orders, publication, quarantine)
        validations = ValidationLog(self.queue, steps.loggers, term.step)
        validated = ValidationGroups(
            self.queue, steps.samples, self.config.replay.groups_per_step, self.training.reward_model_scores,
            self.config.learner.reward_model, vocabulary_size(self.config.model.path),
        )  # fmt: skip
        notices = Notices(self.fleet.client, self.config.run)
        loops = (
            publication.publish_loop(), publication.catch_up_loop(), orders.watch(),
            # Training does not depend on these scores.
            repeated(
                validations.log_new, VALIDATIONS_POLL_S, "the scores of validations cannot be read", (PenstockError,)
            ),
            repeated(validated.read_new, VALIDATIONS_POLL_S, "the samples of validations cannot be read"),
            repeated(
                partial(forget_silent_servers, self.fleet, notices, term.number), SERVERS_POLL_S,
                "cannot look for servers that have died",
            ),
        )  # fmt: skip
        tasks = [asyncio.create_task(each) for each in loops]
        training = asyncio.create_task(self._train(steps, validations, validated))
        try:
            done, _ = await asyncio.wait({*tasks, training}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (training, *tasks):
                await end_task(task)
            await steps.writer.abandon()
            await validations.end()
            await asyncio.to_thread(steps.samples.close)
            await asyncio.to_thread(steps.loggers.close)

    async def _train(self, steps: StepLoop, validations: ValidationLog, validated: ValidationGroups) -> None:
        """Make the steps of a term. If none follows, wait for the validation of the last policy, so that its scores and
        samples reach the loggers."""
        await steps.run()
        timeout_s = self.config.dataset.validation.last_timeout_s
        if timeout_s and self.config.dataset.validation.file is not None and not self.stopping.is_set():
            await self.phases.enter(LEARNER, LAST_VALIDATION)
            heartbeats = Heartbeats(self.fleet.client, self.config.run)
            started = time.monotonic()
            await validations.wait_for_last(steps.term.step, heartbeats, timeout_s, self.stopping)
            await validated.finish(max(0.0, started + timeout_s - time.monotonic()), self.stopping)

    def _make_step_loop(
        self, term: Term, orders: OperatorOrders, publication: PolicyPublication, quarantine: ServerQuarantine
    ) -> StepLoop:
        loggers = open_loggers(self.config, term.step)
        failed_rewards = FailedRewards(
            self.config.rollout.reward.max_failed_share, self.config.replay.groups_per_step, self.control.pause
        )
        return StepLoop(
            config=self.config,
            term=term,
            queue=self.queue,
            orders=orders,
            reader=BatchReader(
                self.queue, self.config.replay, self.config.learner, term, vocabulary_size(self.config.model.path),
                quarantine, failed_rewards, self._is_paused, DataEnd(self.queue, self.config.dataset),
            ),
            training=self.training,
            agreement=ServerAgreement(
                self.log_prob_check, quarantine, self.training.policy_log_probs, self.fleet, self.metrics,
                self.config.replay.lease_ttl_s,
            ),
            recomputed=RecomputedLogProbs(self.fleet.client, self.config.run),
            publication=publication,
            records=self.records,
            loggers=loggers,
            samples=SampleLog(self.config, term.step, loggers),
            writer=CheckpointWriter(
                self.checkpoints, self.queue, self.trained, self.metrics, term, self._on_durable_checkpoint
            ),
            phases=self.phases,
        )  # fmt: skip

    async def _is_paused(self) -> bool:
        return (await self.control.orders()).is_paused

    def _on_durable_checkpoint(self) -> None:
        """Called after each checkpoint: this process has one to rewind to, and the roles have made progress."""
        if self.checkpoint_config.resume == "off":
            self.checkpoint_config = self.checkpoint_config.model_copy(update={"resume": "auto"})
        self.recovery.made_progress()
        self._watch_disk()

    def _watch_disk(self) -> None:
        """Warn if the disk has no room for two more checkpoints: one is written before an old one is removed."""
        if newest := self.checkpoints.newest_first():
            self.disk.needed_bytes = 2 * folder_bytes(newest[0])
        self.disk.measure()
