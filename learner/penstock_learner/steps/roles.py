"""The roles as a step sees them: `await roles.critic.values(batch)`.

A call is split over the ranks of the role and its results are joined, as the worker declares (roles/dispatch.py). A
frozen role whose rank dies is restarted within the call, which is then repeated. The death of a trained role ends the
step: the controller rewinds to a checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError, RoleDied
from penstock.store.fleet import ServerRecord
from penstock.trajectory import Group
from penstock_learner.batches.partition import RankShard, partition, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.role_group import RoleGroup, RoleRecovery, gather_all, trains_as_policy


@dataclass(frozen=True)
class Update:
    """One optimizer step of a role."""

    role: str
    batch: SequenceBatch
    shards: list[RankShard]
    reports: list[Any]
    """One report for each shard."""

    @property
    def num_tokens(self) -> int:
        return int(np.count_nonzero(self.batch.loss_mask))


@dataclass
class Calls:
    """What a step has called: what failed or still runs must not be taken for a trained step."""

    updates: list[Update] = field(default_factory=list)
    update_started: float | None = None
    """When the first update began, by `time.monotonic`."""
    running: list[str] = field(default_factory=list)
    error: Exception | None = None

    def raise_if_unfinished(self, name: str) -> None:
        """Raise the error of a call that failed, even if the step caught it. Raise ConfigError if a call still runs."""
        if self.error is not None:
            raise self.error
        if self.running:
            raise ConfigError(f"{name} returned while {self.running[0]} was running; await every call to a role")


GENERATING_S = 5.0
"""Seconds with requests after which a server's tokens are counted: a batch is trained later than it is generated."""


@dataclass(eq=False)
class Throughput:
    """Tokens and seconds of each phase: calls to roles, and what servers have generated."""

    _totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tokens and seconds by phase, since `rates` was called."""
    _generated: Counter[str] = field(default_factory=Counter)
    """Tokens of each server that are not counted yet."""
    _counted_s: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, num_tokens: float, seconds: float) -> None:
        before = self._totals.get(phase, (0.0, 0.0))
        self._totals[phase] = (before[0] + num_tokens, before[1] + seconds)

    def add_generation(self, servers: Sequence[ServerRecord], groups: Sequence[Group]) -> None:
        """Count the tokens of a batch, per second in which their server had requests."""
        for group in groups:
            self._generated[group.server_id] += group.num_response_tokens
        for server in servers:
            seconds = server.generating_s - self._counted_s.get(server.server_id, math.inf)
            if 0 <= seconds < GENERATING_S:
                continue
            num_tokens = self._generated.pop(server.server_id, 0)
            self._counted_s[server.server_id] = server.generating_s
            if seconds > 0:  # else it is new, or was started again
                self.add("generation", num_tokens, seconds)

    def rates(self) -> dict[str, float]:
        """Tokens per second of each phase since the call before, as numbers of a step."""
        totals, self._totals = self._totals, {}
        return {
            f"{phase}_tokens_per_second": tokens / seconds for phase, (tokens, seconds) in totals.items() if seconds
        }


@dataclass(frozen=True)
class RoleAccess:
    """How roles are called, for all steps of a learner."""

    config: LearnerConfig
    recovery: RoleRecovery
    trained: frozenset[str]
    """Names of the roles whose weights change."""
    prefix_sharing: frozenset[str] = frozenset()
    """Names of the roles that compute what the sequences of a group have in common once."""
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One call at a time to a frozen role: the steps of two batches may call it, and one of them restarts it."""
    throughput: Throughput = field(default_factory=Throughput)

    def shards(self, role: str, num_ranks: int, batch: SequenceBatch) -> tuple[list[RankShard], int]:
        """The shards of a batch, and how many ranks share each of them under sequence parallelism."""
        if role != "policy":  # only the policy replays the engine's choice of experts
            batch = replace(batch, routed_experts=None)
        num_sharing = self.config.sequence_parallel_of(role)
        shards = partition(
            batch,
            num_ranks // num_sharing,
            self.config.micro_batch_tokens * num_sharing,
            shares_prefixes=role in self.prefix_sharing,
        )
        return shards, num_sharing


class Role:
    """One role. Its declared methods are those of its worker; they return awaitables."""

    def __init__(self, group: RoleGroup, access: RoleAccess, calls: Calls) -> None:
        self._group = group
        self._access = access
        self._calls = calls
        self.name = group.name

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Awaitable[Any]:
            return self._counted(method, arguments)

        return call

    async def _counted(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make the call, and note it while it runs and if it fails."""
        title = f"{self.name}.{method}"
        self._calls.running.append(title)
        try:
            return await self._call(method, arguments)
        except Exception as error:
            self._calls.error = self._calls.error or error
            raise
        finally:
            self._calls.running.remove(title)

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        join = self._group.declarations.get(method)
        if join is None:
            known = ", ".join(self._group.declarations) or "none"
            raise ConfigError(f"the {self.name} role has no method {method!r} for steps; its methods are: {known}")
        if join == "ranks":
            return await self._call_ranks(method, [arguments] * self._group.num_ranks)
        batch, *others = arguments
        if not isinstance(batch, SequenceBatch):
            raise ConfigError(f"{self.name}.{method} takes a batch first, not a {type(batch).__name__}")
        if batch.num_sequences == 0:
            if join == "reports":
                raise ConfigError(f"{self.name}.{method} was called with a batch without sequences; omit the call")
            return np.zeros(0, dtype=np.float32)
        shards, num_sharing = self._access.shards(self.name, self._group.num_ranks, batch)
        calls = [(shard, *others) for shard in shards for _ in range(num_sharing)]
        if join == "reports":
            self._require_proximal(method, batch)
            self._calls.update_started = self._calls.update_started or time.monotonic()
        started = time.monotonic()
        results = (await self._call_ranks(method, calls))[::num_sharing]
        forward = "log_probs" if self.name == "policy" else self.name
        phase = forward if join != "reports" else "update" if self.name == "policy" else f"{self.name}_update"
        num_tokens = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
        self._access.throughput.add(phase, num_tokens, time.monotonic() - started)
        if join in ("tokens", "sequences"):
            self._check_sizes(method, join, results, shards)
            return unpermute(results, shards, batch, by_token=join == "tokens")
        update = Update(self.name, batch, shards, results)
        self._calls.updates.append(update)
        return update

    def _require_proximal(self, method: str, batch: SequenceBatch) -> None:
        """Raise ConfigError if a later update of the policy, or of a role that trains as it does, lacks the log-probs
        from before the first one, which computes its own."""
        is_later = any(update.role == self.name for update in self._calls.updates)
        is_beside = self._calls.running.count(f"{self.name}.{method}") > 1
        config = self._access.config
        is_missing = config.algorithm.correction.recomputes and batch.old_log_probs is None
        if is_missing and (is_later or is_beside) and trains_as_policy(config, self.name):
            raise ConfigError(
                f"{self.name}.{method} was called more than once in a step, with a batch without old_log_probs; "
                f"compute them by {self.name}.log_probs before the first update"
            )

    def _check_sizes(self, method: str, unit: str, results: Sequence[Any], shards: Sequence[RankShard]) -> None:
        """Raise ConfigError if a rank has not returned one number for each token or sequence of its micro-batches."""
        for result, shard in zip(results, shards, strict=True):
            micros = shard.micro_batches
            wanted = sum(int(m.response_lengths.sum()) if unit == "tokens" else m.num_sequences for m in micros)
            if np.shape(result) != (wanted,):
                raise ConfigError(
                    f"{self.name}.{method} returned an array of shape {np.shape(result)} for the {wanted} {unit} of a "
                    f"rank's micro-batches; return one number for each of them, or declare another join than {unit!r}"
                )

    async def _call_ranks(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self.name in self._access.trained:
            return await self._group.call_each(method, calls)
        async with self._access.locks[self.name]:
            while True:
                try:
                    return await self._group.call_each(method, calls)
                except RoleDied as error:
                    await self._access.recovery.restart(self._group, error)


class Roles(Mapping[str, Role]):
    """The roles of a run by name: `roles.policy` or `roles["policy"]`. Without `with_trained` the frozen roles alone,
    for what is computed a step ahead."""

    def __init__(self, groups: Mapping[str, RoleGroup], access: RoleAccess, *, with_trained: bool = True) -> None:
        self.calls = Calls()
        self._roles = {
            name: Role(group, access, self.calls)
            for name, group in groups.items()
            if with_trained or name not in access.trained
        }
        self._hidden = groups.keys() - self._roles.keys()

    def __getitem__(self, name: str) -> Role:
        if name in self._hidden:
            raise ConfigError(f"the {name} role is trained, so it cannot be called a step ahead; call it in the step")
        if name not in self._roles:
            raise ConfigError(f"the run has no role {name!r}; its roles are: {', '.join(self._roles)}")
        return self._roles[name]

    def __getattr__(self, name: str) -> Role:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._roles

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)


async def gather_fields(**calls: Awaitable[NDArray[Any]] | None) -> dict[str, NDArray[Any]]:
    """The results of calls that run at the same time, by name. A call that is None is skipped."""
    made = {name: call for name, call in calls.items() if call is not None}
    return dict(zip(made, await gather_all(*made.values()), strict=True))


@dataclass(frozen=True)
class BatchContext:
    """What is known when a batch has been read, maybe a step ahead of its training."""

    config: LearnerConfig
    groups: Sequence[Group]
    """The groups that the batch was made of, in its order."""

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    @property
    def data_sources(self) -> list[str]:
        return [group.data_source for group in self.groups for _ in group.trajectories]


class AheadBatch:
    """The batch with what was computed a step ahead, or is still being computed."""

    def __init__(self, computing: asyncio.Future[SequenceBatch]) -> None:
        self.computing = computing
        self.was_read = False

    async def read(self) -> SequenceBatch:
        self.was_read = True
        return await self.computing


@dataclass(frozen=True)
class StepContext(BatchContext):
    """What is known when the batch is trained."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Version of the policy's weights before the step."""
    kl_coefficient: float
    ahead_batch: AheadBatch

    async def ahead(self) -> SequenceBatch:
        """The batch with the fields that the program's `ahead` computes. Every step must await it. It may not be ready
        yet: await it together with calls that do not need its fields."""
        return await self.ahead_batch.read()

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the correction needs the policy's own log-probs of the batch, before the first update."""
        return self.config.recomputes_log_probs

    def minibatches(self, batch: SequenceBatch, role: str = "policy") -> list[SequenceBatch]:
        """The parts of the batch in the order in which they train this role: all parts, once for each epoch. Parts are
        made of neighbouring sequences, or with `shuffle_minibatches` of random ones, which are others in each epoch.
        Greedy samples, which are not trained, are omitted."""
        config = self.config.training_of(role)
        if config.minibatches_per_step == 1 and not config.shuffle_minibatches:
            return [batch.without_baselines()] * config.epochs_per_step
        return [batch.select(part.tolist()) for part in self._parts(batch, config)]

    def first_update(self, batch: SequenceBatch) -> NDArray[np.int64]:
        """The sequences of the first update, if no pass need compute their log-probs before it: its own pass has the
        weights from before the step. None of them if they are trained again, or if the KL penalty is in the reward."""
        if self.config.epochs_per_step > 1 or self.algorithm.kl.in_reward:
            return np.zeros(0, dtype=np.int64)
        return self._parts(batch, self.config)[0]

    def _parts(self, batch: SequenceBatch, config: LearnerConfig) -> list[NDArray[np.int64]]:
        """The sequences of each part, in the order of `minibatches`."""
        is_baseline = batch.is_baseline
        trained = np.arange(batch.num_sequences) if is_baseline is None else np.flatnonzero(~is_baseline)
        num_parts = max(1, min(config.minibatches_per_step, len(trained)))
        epochs = range(config.epochs_per_step)
        orders = [trained for _ in epochs]
        if config.shuffle_minibatches:
            # numpy guarantees RandomState's streams, so a repeated step has the same parts under every release.
            chances = [np.random.RandomState([config.shuffle_seed, self.step, epoch]) for epoch in epochs]
            orders = [trained[chance.permutation(len(trained))] for chance in chances]
        return [part for order in orders for part in np.array_split(order, num_parts)]


Step = Callable[[SequenceBatch, Roles, StepContext], Awaitable[tuple[SequenceBatch, dict[str, float]]]]
"""Trains the roles on a batch without fields of `ahead`. Returns the batch with all fields, and its own numbers."""
Ahead = Callable[[SequenceBatch, Roles, BatchContext], Awaitable[SequenceBatch]]
"""Adds what the frozen roles compute. It runs while the batch before it is trained."""
