"""Compares every server with the learner before a batch is trained, and keeps servers that disagree out of training.

    batch ─► samples ─► the policy's log-probs ─► verdicts (comparison.py) ─► quarantine

The run ends only if every server of the fleet is beyond the configured limit, and loading its weights again did not
help or could not have helped. By then nothing of the batch was trained.

`ServerQuarantine` is the learner's side of a quarantine: who is in it, which groups it refuses, and when weights are
loaded again. penstock/store/fleet.py draws the phases. loop/publication.py loads the servers' weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.store.fleet import Fleet, Quarantine, Quarantines, ServerRecord
from penstock.trajectory import Group
from penstock_learner.agreement.comparison import (
    ComparedSample,
    LogProbCheck,
    ServerVerdict,
    choose,
    compare,
    disagreement,
    enough,
)
from penstock_learner.checkpoints.trainer_state import Lineage
from penstock_learner.metrics import LearnerMetrics

logger = logging.getLogger(__name__)
NUM_PROBES = 2
"""Groups that a server samples after its weights were loaded, to be compared."""
DRAIN_TIMEOUT_S = 60.0
"""Longest wait for a server's running groups before its weights are loaded. These groups are refused in any case."""
PROBE_TIMEOUT_S = 300.0
"""Time after which a server whose probes were not compared is loaded and probed again."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 10.0, 300.0
"""Time until weights are loaded again after the first probes that disagreed, and at most."""


@dataclass(eq=False)
class ServerQuarantine:
    """The quarantines of a run during one term. Its records in Redis outlive the learner."""

    store: Quarantines
    term: int
    records: dict[str, Quarantine] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while Redis and `records` are made equal, so that neither misses a change of the other."""
    _load_after: dict[str, float] = field(default_factory=dict)
    """When the weights of a server may be loaded at the earliest, if it must wait."""
    _drained_by: dict[str, float] = field(default_factory=dict)
    """When the weights of a server are loaded even if groups are still running there."""
    _trusted_from: dict[str, int] = field(default_factory=dict)
    """The version that a server had loaded when its quarantine ended. Samples of older ones may still arrive."""
    _loaded_version: dict[str, int] = field(default_factory=dict)

    async def read(self) -> None:
        """Read the records, with the probes that were leased since. A server that left the fleet has none."""
        async with self._changing:
            self.records = await self.store.read()
        for times in (self._load_after, self._drained_by):
            for left in times.keys() - self.records.keys():
                del times[left]

    def holds(self, server_id: str) -> bool:
        return server_id in self.records

    async def refuses(self, group: Group) -> bool:
        """Whether a server in quarantine sampled a part of the group, other than as a probe, or a server that left it
        sampled a part with the weights that it had before."""
        servers = {group.server_id, *(name for trajectory in group.trajectories for name in trajectory.server_ids)}
        if any(group.min_version < self._trusted_from.get(name, 0) for name in servers if not self.holds(name)):
            return True
        if not any(map(self.holds, servers)):
            return False
        await self.read()
        held = [record for name in servers if (record := self.records.get(name)) is not None]
        return any(group.prompt_id not in record.probe_ids for record in held)

    async def begin(self, verdict: ServerVerdict, policy_version: int) -> None:
        """Put a server into quarantine, or note that its probes disagreed too."""
        before = self.records.get(verdict.server_id)
        record = Quarantine(
            verdict.server_id,
            verdict.mismatch_nats,
            verdict.limit_nats,
            policy_version,
            since_ms=before.since_ms if before else await self.store.now_ms(),
            num_reloads=before.num_reloads if before else 0,
        )
        if record.num_reloads:
            backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (record.num_reloads - 1), MAX_BACKOFF_S)
            self._load_after[verdict.server_id] = time.monotonic() + backoff_s
        else:
            self._load_after.pop(verdict.server_id, None)
        self._drained_by[verdict.server_id] = time.monotonic() + DRAIN_TIMEOUT_S
        logger.error(
            "%s is in quarantine: its log-probs differ by %.3g nats per token, more than %.3g (version %d, weights "
            "loaded again %d times); its groups are not trained",
            record.server_id, record.mismatch_nats, record.limit_nats, policy_version, record.num_reloads,
        )  # fmt: skip
        await self._put(record)

    async def end(self, server_id: str) -> None:
        logger.warning("%s leaves the quarantine, and its groups are trained again", server_id)
        async with self._changing:
            await self.store.end(server_id, self.term)
            self.records.pop(server_id, None)
        if server_id in self._loaded_version:
            self._trusted_from[server_id] = self._loaded_version.pop(server_id)
        self._load_after.pop(server_id, None)
        self._drained_by.pop(server_id, None)

    async def probe_again(self, server_id: str) -> None:
        """Ask for new probes, because the last ones could not be compared."""
        if (record := self.records.get(server_id)) is not None:
            await self._put(replace(record, probes_left=NUM_PROBES, probe_ids=frozenset()))

    async def one_more_probe(self, group: Group) -> None:
        """Ask for another probe if this group was one that will not be compared."""
        if self.holds(group.server_id):
            await self.read()
            if (record := self.records.get(group.server_id)) is not None:
                await self._put(replace(record, probes_left=record.probes_left + 1))

    async def loaded(self, server_id: str, policy_version: int, num_probes: int = NUM_PROBES) -> None:
        """Note that the server has loaded this version wholly. It is probed next."""
        if (record := self.records.get(server_id)) is None:
            return
        logger.info("%s has loaded its weights again; %d groups of it will be compared", server_id, num_probes)
        self._load_after[server_id] = time.monotonic() + PROBE_TIMEOUT_S
        self._loaded_version[server_id] = policy_version
        await self._put(
            replace(record, num_reloads=record.num_reloads + 1, probes_left=num_probes, probe_ids=frozenset())
        )

    def awaits_load(self, server_id: str) -> bool:
        """Whether the server takes part in no push until its weights were loaded again."""
        record = self.records.get(server_id)
        return record is not None and not record.probes_left and not record.probe_ids

    def is_due(self, server: ServerRecord) -> bool:
        if not self.holds(server.server_id):
            return False
        now = time.monotonic()
        is_drained = server.running_groups == 0 or now >= self._drained_by.get(server.server_id, 0.0)
        return is_drained and now >= self._load_after.get(server.server_id, 0.0)

    async def _put(self, record: Quarantine) -> None:
        async with self._changing:
            await self.store.put(record, self.term)
            self.records[record.server_id] = record


LogProbs = Callable[[Sequence[Group]], Awaitable[NDArray[np.float32]]]
"""[T] log-probs of the groups' response tokens under the policy's weights, in order."""
DRIFT_TOKENS = 1024
"""Trained tokens that are computed again in the next step, to see how far the policy has moved."""
RELOADS_THAT_FAILED = 2
"""A server that disagrees after its weights were loaded this often is not helped by loading them again."""


@dataclass(frozen=True)
class _Compared:
    """The samples of a step, and the learner's log-probs of them before its update."""

    step: int
    samples: list[ComparedSample]
    log_probs: NDArray[np.float32]
    num_rewinds: int


@dataclass(eq=False)
class ServerAgreement:
    """Decides for each batch of a term which groups must not be trained."""

    check: LogProbCheck
    quarantine: ServerQuarantine
    log_probs: LogProbs
    fleet: Fleet
    metrics: LearnerMetrics
    silence_s: float
    """A server whose last heartbeat is older than this does not count as part of the fleet."""
    _known: set[str] = field(default_factory=set)
    """Servers that were in the fleet during this term. Groups of others (imports, sessions) cannot be sampled again, so
    they are compared and never refused."""
    _alive: set[str] = field(default_factory=set)
    _beyond: dict[str, ServerVerdict] = field(default_factory=dict)
    """Servers beyond the configured limit that are not helped by loading their weights again."""
    _step: int = 0
    _judged: set[str] = field(default_factory=set)
    """Servers that were judged in this step."""
    _last: _Compared | None = None

    async def begin(self) -> None:
        """Call it before the term's first batch is read."""
        self.check.forget_drift()
        await self.quarantine.read()
        if not self.check.is_on:  # nothing compares the servers any more
            for server_id in list(self.quarantine.records):
                await self.quarantine.end(server_id)

    async def refused(self, step: int, groups: Sequence[Group], version: int, lineage: Lineage) -> list[int]:
        """Prompts of a step's batch whose groups must not be trained by weights of `version`. Call it again for the
        batch in which they were replaced. Raises ConfigError if every server disagrees."""
        if not self.check.is_on:
            return []
        if step != self._step:
            self._step, self._judged = step, set()
        servers = await self.fleet.servers()
        self._known.update(server.server_id for server in servers)
        self._alive = {server.server_id for server in servers if server.heartbeat_age_ms < 1000 * self.silence_s}
        refused = [group.prompt_id for group in groups if await self.quarantine.refuses(group)]
        others = [group for group in groups if group.prompt_id not in refused]
        new = [group for group in others if group.server_id not in self._judged]
        verdicts = await self._judge(new, version, lineage)
        self._judged.update(verdicts)
        found = {name: (verdict.mismatch_nats, verdict.limit_nats) for name, verdict in verdicts.items()}
        self.metrics.record_agreement(found, self._alive)
        self._raise_if_all_disagree(verdicts)
        await self._follow(verdicts, version)
        held = [group for group in others if self.quarantine.holds(group.server_id)]
        for server_id in {group.server_id for group in held} - self._judged:
            await self.quarantine.probe_again(server_id)
        return [*refused, *(group.prompt_id for group in held)]

    async def _judge(self, groups: Sequence[Group], version: int, lineage: Lineage) -> dict[str, ServerVerdict]:
        """Compare some trajectories. The samples of the step before are computed again, to see how they moved."""
        samples, before = choose(groups, self._step, self.quarantine.records), self._last
        if not samples:
            return {}
        if before is not None and before.step == self._step:
            before = None  # the weights are the same
        elif before is not None and (before.step, before.num_rewinds) != (self._step - 1, len(lineage)):
            self.check.forget_drift()
            before = None
        old = before.samples if before else []
        groups = [replace(sample.group, trajectories=(sample.trajectory,)) for sample in (*old, *samples)]
        computed = await self.log_probs(groups)
        if not np.isfinite(computed).all():
            return {}  # the update of this batch is skipped and counted
        log_probs = computed
        if before is not None:
            log_probs = computed[len(before.log_probs) :]
            self.check.add_drift(_mean_difference(before, computed[: len(before.log_probs)]))
        if self._last is None or self._last.step != self._step:
            kept = enough(samples, DRIFT_TOKENS)
            num_kept = sum(len(sample.trajectory.token_ids) for sample in kept)
            self._last = _Compared(self._step, kept, log_probs[:num_kept], len(lineage))
        oldest = np.array([sample.trajectory.min_version for sample in samples])
        staleness = version - lineage.in_steps(oldest)
        for each in lineage.rewinds:  # versions from before a restart are not compared: a lost batch may change them
            staleness[(each.from_version < oldest) & (oldest < each.to_version)] = -1
        return self.check.judge(compare(samples, staleness.tolist(), log_probs), frozenset(self.quarantine.records))

    def _raise_if_all_disagree(self, verdicts: Mapping[str, ServerVerdict]) -> None:
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

    async def _follow(self, verdicts: Mapping[str, ServerVerdict], version: int) -> None:
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

    def _is_accepted(self, verdict: ServerVerdict) -> bool:
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
    trained = np.concatenate([sample.trajectory.loss_mask for sample in compared.samples]).astype(bool)
    return float(np.abs(log_probs - compared.log_probs)[trained].mean())
