"""Judges how well each server's log-probs agree with the learner's. Pure: it knows nothing of Redis or of ranks.

The engine's log-probs of its samples are compared with the learner's own forward pass, before the update. Two limits
apply to the mean difference of a server's tokens:

    configured   `max_logprob_mismatch_nats`.
    usual        what is typical of the dtype, and FACTOR times what was usual in earlier steps. It finds a server that
                 missed an update long before its difference is large: a correct server is far below it.

A server that is beyond a limit in STRIKES steps in a row disagrees. It disagrees at once if it is beyond the configured
limit on the learner's own weights, and has never agreed or is at more than twice the limit. Both limits allow for top-p
and for the drift of the policy since older versions, which is measured on the samples of the step before (`add_drift`).

Baselines are not compared: greedy decoding reports its log-probs at another temperature. Nor are trajectories that one
server has continued for another: they would not say which of the two is wrong.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import TYPICAL_MISMATCH_NATS
from penstock.errors import ConfigError
from penstock.trajectory import Group, Trajectory

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
    by_server: dict[str, list[tuple[int, ComparedSample]]] = {}
    for group in groups:
        for place, sample in enumerate(_comparable(group)):
            by_server.setdefault(sample.server_id, []).append((place, sample))
    total = sum(sample.num_tokens for placed in by_server.values() for _, sample in placed)
    budget = max(MIN_BUDGET_TOKENS, SHARE * total)
    chosen: list[ComparedSample] = []
    for name in sorted(by_server, key=lambda name: (name not in first, zlib.crc32(f"{step} {name}".encode()))):
        if name not in first and sum(sample.num_tokens for sample in chosen) >= budget:
            break
        chosen += enough(_in_order(by_server[name])[:PER_SERVER], ENOUGH_TOKENS)
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


def _comparable(group: Group) -> list[ComparedSample]:
    return [
        ComparedSample(group, trajectory)
        for trajectory in group.trajectories
        if not trajectory.is_baseline and trajectory.has_trained_token and len(trajectory.server_ids) <= 1
    ]


def _in_order(placed: Sequence[tuple[int, ComparedSample]]) -> list[ComparedSample]:
    """The samples of one server: one of each version in turn, the newest first, and from different groups first."""
    ranked = sorted(placed, key=lambda entry: entry[0])
    turns: Counter[int] = Counter()
    ordered = []
    for _, sample in ranked:
        version = sample.trajectory.min_version
        ordered.append((turns[version], -version, sample))
        turns[version] += 1
    return [sample for *_, sample in sorted(ordered, key=lambda entry: entry[:2])]


def compare(
    samples: Sequence[ComparedSample], staleness: Sequence[int], log_probs: NDArray[np.float32]
) -> list[Comparison]:
    """Compare the samples with the learner's log-probs [T] of all their tokens. `staleness` is that of each sample."""
    comparisons, start = [], 0
    for sample, steps in zip(samples, staleness, strict=True):
        trajectory, group = sample.trajectory, sample.group
        trained, end = trajectory.loss_mask.astype(bool), start + len(trajectory.token_ids)
        difference = np.abs(log_probs[start:end] - trajectory.log_probs)[trained]
        nucleus_nats = -math.log(trajectory.min_top_p(group.sampling))
        if trajectory.has_top_k_or_min_p(group.sampling):
            nucleus_nats = UNBOUNDED_NATS
        comparisons.append(Comparison(sample.server_id, steps, len(difference), float(difference.mean()), nucleus_nats))
        start = end
    return comparisons


METRIC = "logprob_mismatch"
FACTOR = 3.0
"""How many times its usual value a difference may reach."""
DRIFT_FACTOR = 3.0
"""How many times the measured drift is allowed for. Servers sample other tokens than those on which it is measured."""
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
        self.typical_nats = TYPICAL_MISMATCH_NATS[dtype]
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

    def remember(self, metrics: Mapping[str, float]) -> None:
        if METRIC in metrics:
            self.last = {METRIC: metrics[METRIC]}

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
        limit = configured if usual is None else min(configured, self.typical_nats + FACTOR * usual + allowance)
        agrees, is_beyond = mismatch <= limit, not mismatch <= configured
        self._strikes[name] = 0 if agrees else self._strikes.get(name, 0) + 1
        is_exact = all(one.staleness == 0 for one in found) and sum(one.num_tokens for one in found) >= MIN_TOKENS
        is_clear = is_beyond and is_exact and (name not in self.agreed or not mismatch <= 2 * configured)
        is_enough = is_probed or is_clear or self._strikes[name] >= STRIKES
        disagrees = not agrees and is_enough
        return ServerVerdict(name, mismatch, limit, agrees, disagrees, is_beyond)

    def _drift_of(self, found: Sequence[Comparison]) -> float:
        """Mean drift of the learner between the versions that sampled the tokens and now."""
        drifts = [0.0]
        for drift in reversed(self._drifts):
            drifts.append(drifts[-1] + drift)
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
