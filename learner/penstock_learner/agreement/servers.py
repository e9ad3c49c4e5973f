"""Compares every server with the learner before a batch is trained, and keeps servers that disagree out of training.

    batch ─► samples ─► the policy's log-probs ─► verdicts ─► quarantine

The run ends only if every server of the fleet is beyond the configured limit, and loading its weights again did not
help or could not have helped. By then nothing of the batch was trained.

`ServerQuarantine` is the learner's side of a quarantine: who is in it, which groups it refuses, and when weights are
loaded again. penstock/store/fleet.py draws the phases. loop/publication.py loads the servers' weights.

`LogProbCheck` judges; it knows nothing of Redis or of ranks. The engine's log-probs of its samples are compared with
the learner's own forward pass, before the update. Two limits apply to the mean difference of a server's tokens:

    configured   `max_logprob_mismatch_nats`.
    usual        an allowance for the dtype, and FACTOR times what was usual in earlier steps. It finds a server that
                 missed an update long before its difference is large: a correct server is far below it.

A server that is beyond a limit in STRIKES steps in a row disagrees. It disagrees at once if it is beyond the configured
limit on the learner's own weights, and has never agreed or is at more than twice the limit. Both limits allow for top-p
and for the drift of the policy since older versions, which is measured on the samples of the step before (`add_drift`).

Baselines are not compared: greedy decoding reports its log-probs at another temperature. Nor are trajectories that one
server has continued for another: they would not say which of the two is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import ALLOWED_MISMATCH_NATS
from penstock.errors import ConfigError
from penstock.store.fleet import Fleet, Quarantine, Quarantines, ServerRecord
from penstock.trajectory import Group, Trajectory
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.term import Rewind, Term

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
    last_rewind: Rewind | None
    """The run's newest rewind at the time."""


@dataclass(eq=False)
class ServerAgreement:
    """Decides for each batch of a term which groups must not be trained."""

    check: LogProbCheck
    quarantine: ServerQuarantine
    log_probs: Callable[[Sequence[Group]], Awaitable[NDArray[np.float32]]]
    """[T] log-probs of the groups' response tokens under the policy's weights, in order."""
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

    async def refused(self, step: int, groups: Sequence[Group], term: Term) -> list[int]:
        """Prompts of a step's batch whose groups must not be trained by the weights of the term. Call it again for
        the batch in which they were replaced. Raises ConfigError if every server disagrees."""
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
        verdicts = await self._judge(new, term)
        self._judged.update(verdicts)
        found = {name: (verdict.mismatch_nats, verdict.limit_nats) for name, verdict in verdicts.items()}
        self.metrics.record_agreement(found, self._alive)
        self._raise_if_all_disagree(verdicts)
        await self._follow(verdicts, term.policy_version)
        held = [group for group in others if self.quarantine.holds(group.server_id)]
        for server_id in {group.server_id for group in held} - self._judged:
            await self.quarantine.probe_again(server_id)
        return [*refused, *(group.prompt_id for group in held)]

    async def _judge(self, groups: Sequence[Group], term: Term) -> dict[str, ServerVerdict]:
        """Compare some trajectories. The samples of the step before are computed again, to see how they moved."""
        samples, before = choose(groups, self._step, self.quarantine.records), self._last
        if not samples:
            return {}
        if before is not None and before.step == self._step:
            before = None  # the weights are the same
        elif before is not None and (before.step, before.last_rewind) != (self._step - 1, term.last_rewind):
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
            self._last = _Compared(self._step, kept, log_probs[:num_kept], term.last_rewind)
        oldest = np.array([sample.trajectory.min_version for sample in samples])
        staleness = term.policy_version - term.in_steps(oldest)
        staleness[term.were_rewound(oldest)] = -1  # they are not compared
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
        """Whether a server that differs more than usual nevertheless serves: its weights were loaded again, it is
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


# ── samples and verdicts ──

SHARE = 0.02
"""Share of a batch's tokens that are compared. They cost a forward pass."""
MIN_BUDGET_TOKENS = 4096
"""Tokens that may be compared even if the batch is small."""
PER_SERVER = 16
"""Trajectories of one server that are compared in a step, at most."""
ENOUGH_TOKENS = 256
"""Trained tokens of one server after which no more of its trajectories are compared in a step."""
UNBOUNDED_NATS = 20.0
"""More than any difference that renormalising over one token of a vocabulary can make."""


@dataclass(frozen=True)
class ComparedSample:
    """One trajectory to compare."""

    group: Group
    trajectory: Trajectory

    @property
    def server_id(self) -> str:
        return self.trajectory.server_ids[0] if self.trajectory.server_ids else self.group.server_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.group.prompt_token_ids) + len(self.trajectory.token_ids)


@dataclass(frozen=True)
class Comparison:
    """The difference between a server's log-probs and the learner's, over the trained tokens of one trajectory."""

    server_id: str
    staleness: int
    """Steps of training since the oldest version that sampled a token. 0 if both sides used the same weights."""
    num_tokens: int
    mean_nats: float
    """Mean absolute difference."""
    nucleus_nats: float
    """The difference that top-p alone explains: the engine renormalises over a nucleus that holds at least top_p. Under
    top-k and min-p the nucleus may hold anything, so UNBOUNDED_NATS."""


def choose(groups: Sequence[Group], step: int, first: Collection[str] = ()) -> list[ComparedSample]:
    """A few trajectories of each version of every server, as far as the budget of tokens reaches. The servers in
    `first` always have their turn. The order of the others depends on the step."""
    comparable = [
        [
            ComparedSample(group, trajectory)
            for trajectory in group.trajectories
            if not trajectory.is_baseline and trajectory.has_trained_token and len(trajectory.server_ids) <= 1
        ]
        for group in groups
    ]
    by_server: defaultdict[str, list[ComparedSample]] = defaultdict(list)
    for sample in _in_turns(comparable):
        by_server[sample.server_id].append(sample)
    total = sum(sample.num_tokens for samples in comparable for sample in samples)
    budget = max(MIN_BUDGET_TOKENS, SHARE * total)
    chosen: list[ComparedSample] = []
    for name in sorted(by_server, key=lambda name: (name not in first, zlib.crc32(f"{step} {name}".encode()))):
        if name not in first and sum(sample.num_tokens for sample in chosen) >= budget:
            break
        # One sample of each version in turn, the newest first, and from different groups first.
        by_version: defaultdict[int, list[ComparedSample]] = defaultdict(list)
        for sample in by_server[name]:
            by_version[sample.trajectory.min_version].append(sample)
        newest_first = [by_version[version] for version in sorted(by_version, reverse=True)]
        chosen += enough(_in_turns(newest_first)[:PER_SERVER], ENOUGH_TOKENS)
    return chosen


def enough(samples: Sequence[ComparedSample], num_tokens: int) -> list[ComparedSample]:
    """The first samples, until they have this many trained tokens."""
    found, so_far = [], 0
    for sample in samples:
        if so_far >= num_tokens:
            break
        found.append(sample)
        so_far += int(sample.trajectory.loss_mask.sum())
    return found


def _in_turns(lists: Sequence[Sequence[ComparedSample]]) -> list[ComparedSample]:
    """The first sample of each list, then the second of each, and so on."""
    return [sample for turn in zip_longest(*lists) for sample in turn if sample is not None]


def compare(
    samples: Sequence[ComparedSample], staleness: Sequence[int], log_probs: NDArray[np.float32]
) -> list[Comparison]:
    """Compare the samples with the learner's log-probs [T] of all their tokens. `staleness` is per sample."""
    comparisons = []
    ends = np.cumsum([len(sample.trajectory.token_ids) for sample in samples])
    for sample, steps, own in zip(samples, staleness, np.split(log_probs, ends[:-1]), strict=True):
        trajectory = sample.trajectory
        difference = np.abs(own - trajectory.log_probs)[trajectory.loss_mask.astype(bool)]
        kept = trajectory.kept_probability(sample.group.sampling)
        nucleus_nats = -math.log(kept) if kept else UNBOUNDED_NATS
        comparisons.append(Comparison(sample.server_id, steps, len(difference), float(difference.mean()), nucleus_nats))
    return comparisons


FACTOR = 3.0
"""How many times its usual value a difference may reach."""
DRIFT_FACTOR = 3.0
"""How many times the measured drift is allowed for. Servers sample other tokens than it is measured on."""
STRIKES = 3
MIN_TOKENS = 16
"""Tokens on the learner's own weights that are enough to disagree at once."""
HISTORY = 64
"""Differences that are remembered, over all servers."""
MIN_STEPS = 3
"""Steps that must have been compared before differences have a usual value."""
MAX_STALENESS = 64


@dataclass(frozen=True)
class ServerVerdict:
    """What the comparisons of one step say about a server."""

    server_id: str
    mismatch_nats: float
    limit_nats: float
    """The limit that applied: the smaller one, or the configured one if only that was exceeded or known."""
    agrees: bool
    """Whether it is within both limits. A server may neither agree nor disagree, while it has too few strikes."""
    disagrees: bool
    is_beyond: bool
    """Whether it is beyond the configured limit."""


class LogProbCheck:
    """Judges one step after another. With `max_mismatch_nats` 0 it judges nothing."""

    def __init__(self, max_mismatch_nats: float, dtype: str = "float32") -> None:
        self.max_mismatch_nats = max_mismatch_nats
        self.allowed_nats = ALLOWED_MISMATCH_NATS[dtype]
        self.agreed: set[str] = set()
        """Servers that have agreed at least once."""
        self.last: dict[str, float] = {}
        """The metric of the last step that had it. Every version's record gets it, because few steps may have it."""
        self._drifts: deque[float] = deque(maxlen=MAX_STALENESS)
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._num_steps = 0
        self._strikes: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        return self.max_mismatch_nats > 0

    def remember(self, mismatch: float | None) -> None:
        if mismatch is not None:
            self.last = {"logprob_mismatch": mismatch}

    def add_drift(self, nats: float) -> None:
        """Note how far the learner's own log-probs moved in the last step, per token."""
        self._drifts.append(nats)

    def forget_drift(self) -> None:
        """Call it when the weights have jumped: at the start of a term, and after a rewind."""
        self._drifts.clear()

    def forget_usual(self) -> None:
        self._history.clear()
        self._strikes.clear()
        self._num_steps = 0

    def judge(
        self, comparisons: Sequence[Comparison], probed: frozenset[str] = frozenset()
    ) -> dict[str, ServerVerdict]:
        """A verdict for each server that can be judged. For servers that are `probed`, one strike is enough."""
        by_server: dict[str, list[Comparison]] = {}
        for comparison in comparisons:
            if 0 <= comparison.staleness <= len(self._drifts):
                by_server.setdefault(comparison.server_id, []).append(comparison)
        usual = self._usual_nats()
        verdicts = {name: self._verdict(name, found, usual, name in probed) for name, found in by_server.items()}
        for name, found in by_server.items():
            if verdicts[name].agrees:
                self.agreed.add(name)
                self._history.append(max(0.0, verdicts[name].mismatch_nats - self._drift_of(found)))
        self._num_steps += bool(verdicts)
        return verdicts

    def _verdict(self, name: str, found: Sequence[Comparison], usual: float | None, is_probed: bool) -> ServerVerdict:
        mismatch = _mean(found, lambda one: one.mean_nats)
        allowance = _mean(found, lambda one: one.nucleus_nats) + DRIFT_FACTOR * self._drift_of(found)
        configured = self.max_mismatch_nats + allowance
        limit = configured if usual is None else min(configured, self.allowed_nats + FACTOR * usual + allowance)
        agrees, is_beyond = mismatch <= limit, not mismatch <= configured
        self._strikes[name] = 0 if agrees else self._strikes.get(name, 0) + 1
        is_exact = all(one.staleness == 0 for one in found) and sum(one.num_tokens for one in found) >= MIN_TOKENS
        is_clear = is_beyond and is_exact and (name not in self.agreed or not mismatch <= 2 * configured)
        is_enough = is_probed or is_clear or self._strikes[name] >= STRIKES
        disagrees = not agrees and is_enough
        return ServerVerdict(name, mismatch, limit, agrees, disagrees, is_beyond)

    def _drift_of(self, found: Sequence[Comparison]) -> float:
        """Mean drift of the learner between the versions that sampled the tokens and now."""
        drifts = list(accumulate(reversed(self._drifts), initial=0.0))
        return _mean(found, lambda one: drifts[one.staleness])

    def _usual_nats(self) -> float | None:
        """The lower quartile of the differences so far, because the median would follow a server that missed an update.
        None before there are enough."""
        if self._num_steps < MIN_STEPS or not self._history:
            return None
        return sorted(self._history)[len(self._history) // 4]


def _mean(comparisons: Sequence[Comparison], value: Callable[[Comparison], float]) -> float:
    num_tokens = sum(one.num_tokens for one in comparisons)
    return sum(one.num_tokens * value(one) for one in comparisons) / num_tokens


def disagreement(verdicts: Sequence[ServerVerdict]) -> ConfigError:
    worst = max(verdicts, key=lambda verdict: verdict.mismatch_nats - verdict.limit_nats)
    others = ", ".join(f"{verdict.server_id} by {verdict.mismatch_nats:.3g}" for verdict in verdicts[:8])
    return ConfigError(
        f"rollout engines and learner disagree by {worst.mismatch_nats:.3g} nats per token on the same weights, more "
        f"than {worst.limit_nats:.3g}, so every ratio of the loss is wrong; servers: {others}; usual causes: a "
        "different model folder; the engine's dtype, quantisation or attention; a sampling option in "
        "rollout.engine.extra; correct the cause, or raise learner.max_logprob_mismatch_nats"
    )
