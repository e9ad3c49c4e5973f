"""Compares every server with the learner before a batch is trained, and keeps servers that disagree out of training.

    batch ─► samples ─► the policy's log-probs ─► verdicts (agreement/comparison.py) ─► agreement/quarantine.py

The run ends only if every server of the fleet is beyond the configured limit, and loading its weights again did not
help or could not have helped. By then nothing of the batch was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.store.fleet import Fleet
from penstock.trajectory import Group
from penstock_learner.agreement.comparison import LogProbCheck, Sample, Verdict, choose, compare, disagreement, enough
from penstock_learner.agreement.quarantine import ServerQuarantine
from penstock_learner.loop.batches import Batch
from penstock_learner.loop.roll_back import RollBack, in_steps
from penstock_learner.loop.training_step import TrainingStep
from penstock_learner.metrics import LearnerMetrics

logger = logging.getLogger(__name__)
DRIFT_TOKENS = 1024
"""Trained tokens that are computed again in the next step, to see how far the policy has moved."""
RELOADS_THAT_FAILED = 2
"""A server that disagrees after its weights were loaded this often is not helped by loading them again."""


@dataclass(frozen=True)
class _Compared:
    """The samples of a step, and the learner's log-probs of them before its update."""

    step: int
    samples: list[Sample]
    log_probs: NDArray[np.float32]
    num_roll_backs: int


class ServerAgreement:
    """Decides for each batch of a term which groups must not be trained."""

    def __init__(
        self, check: LogProbCheck, quarantine: ServerQuarantine, training: TrainingStep, fleet: Fleet,
        metrics: LearnerMetrics, silence_s: float,
    ) -> None:  # fmt: skip
        self.check = check
        self.quarantine = quarantine
        self.training = training
        self.fleet = fleet
        self.metrics = metrics
        self.silence_s = silence_s
        """A server whose last heartbeat is older than this does not count as part of the fleet."""
        self._known: set[str] = set()
        """Servers that were in the fleet during this term. Groups of others (imports, sessions) cannot be sampled
        again, so they are compared and never refused."""
        self._alive: set[str] = set()
        self._beyond: dict[str, Verdict] = {}
        """Servers beyond the configured limit that are not helped by loading their weights again."""
        self._step = 0
        self._judged: set[str] = set()
        """Servers that were judged in this step."""
        self._last: _Compared | None = None

    async def begin(self) -> None:
        """Call it before the term's first batch is read."""
        self.check.forget_drift()
        if self.check.is_on:
            await self.quarantine.read()
        else:
            await self.quarantine.end_all()

    async def refused(self, batch: Batch, version: int, roll_backs: Sequence[RollBack]) -> list[int]:
        """Prompts of the batch whose groups must not be trained. `version` is that of the policy's weights.

        Call it again for the batch in which they were replaced. Raises ConfigError if every server disagrees."""
        if not self.check.is_on:
            return []
        if batch.step != self._step:
            self._step, self._judged = batch.step, set()
        await self._look_at_fleet()
        refused = [group.prompt_id for group in batch.groups if await self.quarantine.refuses(group)]
        others = [group for group in batch.groups if group.prompt_id not in refused]
        new = [group for group in others if group.server_id not in self._judged]
        verdicts = await self._judge(new, version, roll_backs)
        self._judged.update(verdicts)
        self.metrics.record_agreement(verdicts, self._alive)
        self._raise_if_all_disagree(verdicts)
        await self._follow(verdicts, version)
        held = [group for group in others if self.quarantine.holds(group.server_id)]
        for server_id in {group.server_id for group in held} - self._judged:
            await self.quarantine.probe_again(server_id)
        return [*refused, *(group.prompt_id for group in held)]

    async def _look_at_fleet(self) -> None:
        servers = await self.fleet.servers()
        self._known.update(server.server_id for server in servers)
        self._alive = {server.server_id for server in servers if server.heartbeat_age_ms < 1000 * self.silence_s}

    async def _judge(self, groups: Sequence[Group], version: int, roll_backs: Sequence[RollBack]) -> dict[str, Verdict]:
        """Compare some trajectories. The samples of the step before are computed again, to see how they moved."""
        samples, before = choose(groups, self._step, self.quarantine.records), self._last
        if not samples:
            return {}
        if before is not None and before.step == self._step:
            before = None  # the weights are the same
        elif before is not None and (before.step, before.num_roll_backs) != (self._step - 1, len(roll_backs)):
            self.check.forget_drift()
            before = None
        old = before.samples if before else []
        computed = await self.training.policy_log_probs([sample.as_group() for sample in (*old, *samples)])
        if not np.isfinite(computed).all():
            return {}  # the update of this batch is skipped and counted
        log_probs = computed
        if before is not None:
            log_probs = computed[len(before.log_probs) :]
            self.check.add_drift(_mean_difference(before, computed[: len(before.log_probs)]))
        if self._last is None or self._last.step != self._step:
            kept = enough(samples, DRIFT_TOKENS)
            num_kept = sum(len(sample.trajectory.token_ids) for sample in kept)
            self._last = _Compared(self._step, kept, log_probs[:num_kept], len(roll_backs))
        oldest = np.array([sample.trajectory.min_version for sample in samples])
        staleness = version - in_steps(oldest, roll_backs)
        for each in roll_backs:  # versions from before a restart are not compared: a lost batch may make others of them
            staleness[(each.policy_version < oldest) & (oldest < each.new_version)] = -1
        return self.check.judge(compare(samples, staleness.tolist(), log_probs), frozenset(self.quarantine.records))

    def _raise_if_all_disagree(self, verdicts: Mapping[str, Verdict]) -> None:
        """Raise ConfigError if no server is left whose samples can be trained."""
        for name, verdict in verdicts.items():
            record = self.quarantine.records.get(name)
            has_failed = record is not None and record.num_reloads >= RELOADS_THAT_FAILED
            if not (verdict.disagrees and verdict.is_beyond):
                self._beyond.pop(name, None)
            elif has_failed or name not in self.check.agreed:
                self._beyond[name] = verdict
        expected = self._alive or set(verdicts)
        if self._beyond and expected <= set(self._beyond):
            raise disagreement([self._beyond[name] for name in sorted(expected)])

    async def _follow(self, verdicts: Mapping[str, Verdict], version: int) -> None:
        """Begin and end quarantines as the verdicts say."""
        known = [verdict for name, verdict in verdicts.items() if name in self._known]
        probed = [verdict for verdict in known if self.quarantine.holds(verdict.server_id)]
        others = [verdict for verdict in known if verdict not in probed]
        if len(others) > 1 and all(verdict.disagrees and not verdict.is_beyond for verdict in others):
            logger.warning("all servers differ more than usual, within the limit; this is the usual difference now")
            self.check.forget_usual()
            others = []
        for verdict in probed:
            if verdict.agrees or self._is_accepted(verdict):
                await self.quarantine.end(verdict.server_id)
            else:
                await self.quarantine.begin(verdict, version)
        for verdict in others:
            if verdict.disagrees:
                self.metrics.quarantines.inc()
                await self.quarantine.begin(verdict, version)

    def _is_accepted(self, verdict: Verdict) -> bool:
        """Whether a server that differs more than usual serves all the same: its weights were loaded again, it is
        within the configured limit, and no other server is left."""
        record = self.quarantine.records[verdict.server_id]
        if verdict.is_beyond or not record.num_reloads or not self._alive <= set(self.quarantine.records):
            return False
        logger.warning(
            "%s still differs by %.3g nats after its weights were loaded again; this is within the configured limit, "
            "and no other server is left, so it is the usual difference now", verdict.server_id, verdict.mismatch_nats,
        )  # fmt: skip
        self.check.forget_usual()
        return True


def _mean_difference(compared: _Compared, log_probs: NDArray[np.float32]) -> float:
    """How far the learner's log-probs of trained tokens have moved."""
    trained = np.concatenate([sample.trajectory.loss_mask for sample in compared.samples]).astype(bool)
    return float(np.abs(log_probs - compared.log_probs)[trained].mean())
