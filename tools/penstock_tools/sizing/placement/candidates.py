"""The deployments that fit on a budget of GPUs: learners with the ranks of their roles, and rollout servers.

Nothing is simulated here. Each candidate has its memory checked and the seconds of its training step computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from penstock.config.gpu_bundles import RESOURCE_GROUPS
from penstock_tools.sizing.hardware import GPUS_PER_NODE, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import role_moments
from penstock_tools.sizing.memory_terms import Role, Setup, peak, tokens_of_a_rank, total
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.plan import MICRO_BATCH_DIVISORS, TENSOR_PARALLEL, fewest_sequences, sequences, server_plan
from penstock_tools.sizing.planned import PLACEMENTS, Placement
from penstock_tools.sizing.rates import RoleWork, exchange_s, group_s, offload_s, train_s
from penstock_tools.sizing.workload import Workload

SEQUENCE_PARALLEL = (1, 2, 4, 8)
SHARED_UTILIZATIONS = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the memory of a GPU that an engine takes if the learner is on the same GPU."""


def rank_choices(most: int) -> list[int]:
    """Numbers of ranks to try: all up to a node, then 12, multiples of a node up to 64, then wider steps."""
    nodes = [12, *range(16, 65, GPUS_PER_NODE)]
    wider = [size for power in range(6, 14) for size in (2**power + 2 ** (power - 1), 2 ** (power + 1))]
    return [size for size in (*range(1, GPUS_PER_NODE + 1), *nodes, *wider) if size <= most]


@dataclass(frozen=True)
class Task:
    """What is to be placed: the models of a run, its workload, and the kind of GPU."""

    shapes: Mapping[Role, ModelShape]
    """The model of each role that the run has, beginning with the policy."""
    gpu: Gpu
    workload: Workload
    placements: tuple[Placement, ...] = PLACEMENTS

    @property
    def policy(self) -> ModelShape:
        return self.shapes["policy"]

    @property
    def reference_is_policy(self) -> bool:
        """The reference is the policy with its adapter switched off. It has no ranks, but its pass takes time."""
        return bool(self.workload.setup.lora_rank) and self.workload.setup.policy_is_reference

    def groups(self, placement: Placement) -> list[list[Role]]:
        """The roles that share GPUs, beginning with the policy's."""
        present = [role for role in self.shapes if not (role == "reference" and self.reference_is_policy)]
        groups = [[role for role in present if role in names] for names in RESOURCE_GROUPS[placement]]
        return [group for group in groups if group]


@dataclass(frozen=True)
class LearnerChoice:
    """A learner that fits."""

    placement: Placement
    ranks: tuple[tuple[Role, int], ...]
    """Ranks of each role that has memory of its own."""
    setup: Setup
    """Settings of the policy."""
    micro_batch_tokens: int
    sequence_parallel: int
    num_gpus: int
    train_s: float
    is_packed: bool = False
    """All roles are on one GPU."""
    utilization: float = 0.0
    """Share of that GPU that a rollout server takes. 0: servers have their own GPUs."""

    @property
    def policy_ranks(self) -> int:
        return dict(self.ranks)["policy"]


@dataclass(frozen=True)
class ServerChoice:
    """A rollout server that fits, and the number of groups that it works on."""

    tensor_parallel: int
    concurrent_groups: int
    group_s: float


@dataclass(frozen=True)
class Refusal:
    """Something that does not fit."""

    what: str
    needed_bytes: float
    available_bytes: float


@dataclass
class Learners:
    """Enumerates the learners of a task that fit on at most `num_gpus` GPUs. Remembers what did not fit."""

    task: Task
    num_gpus: int
    refusals: dict[tuple[Placement, int], Refusal] = field(default_factory=dict)
    """The policies that do not fit by any micro-batch, by placement and ranks, without offload and Ulysses."""
    _bytes: dict[tuple[Role, int, Setup], float] = field(default_factory=dict)
    _useful: dict[Hashable, list[tuple[int, ...]]] = field(default_factory=dict)

    def choices(self) -> Iterator[LearnerChoice]:
        """Of learners that differ only in the GPUs of the other roles or in the micro-batch, those that are faster
        than every smaller one."""
        for placement in self.task.placements:
            for num_ranks in rank_choices(self.num_gpus):
                for parallel, offloads in itertools.product(self._parallel(num_ranks), self._offloads()):
                    yield from _fastest(self._of_policy(placement, num_ranks, parallel, offloads=offloads))
            yield from self._packed(placement)

    def _of_policy(
        self, placement: Placement, num_ranks: int, parallel: int, *, offloads: bool
    ) -> Iterator[LearnerChoice]:
        """All learners with this policy, the largest micro-batches first."""
        first, *others = self.task.groups(placement)
        seen = set()
        for micro in self._micro_batches(parallel):
            setup = self._fitting(first, num_ranks, parallel, micro, self._room, offloads=offloads)
            if setup is None:
                continue
            fitting = tuple(self._ranks_of(group, micro, setup) for group in others)
            if (setup.staging, fitting) in seen:  # a smaller micro-batch that makes nothing possible
                continue
            seen.add((setup.staging, fitting))
            for ranks in self._useful_ranks(others, fitting):
                if num_ranks + sum(ranks) <= self.num_gpus:
                    counts = dict.fromkeys(first, num_ranks)
                    counts |= {role: count for group, count in zip(others, ranks, strict=True) for role in group}
                    yield self._choice(placement, counts, setup, micro, parallel)
        if parallel == 1 and not offloads and self._smallest_need(first, num_ranks) > self._room:
            what = f"{' and '.join(first)} on {num_ranks} GPU{'s' * (num_ranks > 1)}"
            self.refusals[placement, num_ranks] = Refusal(what, self._smallest_need(first, num_ranks), self._room)

    def _choice(
        self, placement: Placement, counts: Mapping[Role, int], setup: Setup, micro: int, parallel: int
    ) -> LearnerChoice:
        groups = [[(role, counts[role]) for role in group] for group in self.task.groups(placement)]
        num_gpus = sum(group[0][1] for group in groups)
        seconds = self._train_s(groups, setup, parallel)
        return LearnerChoice(placement, tuple(counts.items()), setup, micro, parallel, num_gpus, seconds)

    def _packed(self, placement: Placement) -> Iterator[LearnerChoice]:
        """The learner on one GPU, alone or beside a rollout server. Only split-collocate lets models share GPUs."""
        if placement == "standalone" and len(self.task.groups(placement)) > 1:
            return
        roles = [role for group in self.task.groups(placement) for role in group]
        for share in (0.0, *SHARED_UTILIZATIONS):
            room = self._room - share * self.task.gpu.memory_bytes
            for offloads in self._offloads():
                fitting = (
                    (micro, setup)
                    for micro in self._micro_batches(1)
                    if (setup := self._fitting(roles, 1, 1, micro, room, offloads=offloads)) is not None
                )
                micro, found = next(fitting, (0, None))
                if found is not None:
                    counts = dict.fromkeys(roles, 1)
                    seconds = self._train_s([list(counts.items())], found, 1)
                    ranks = tuple(counts.items())
                    yield LearnerChoice(
                        placement, ranks, found, micro, 1, 1, seconds, is_packed=True, utilization=share
                    )

    # ── memory ──

    @property
    def _room(self) -> float:
        return self.task.gpu.memory_bytes * USABLE_MEMORY

    def _micro_batches(self, parallel: int) -> list[int]:
        """Sizes to try, the largest first."""
        wanted, longest = self.task.workload.setup.micro_batch_tokens, self.task.workload.longest_sequence
        sizes = {max(16, wanted // divisor) for divisor in MICRO_BATCH_DIVISORS}
        sizes.add(max(16, min(wanted, -(-longest // parallel))))
        return sorted(sizes, reverse=True)

    def _parallel(self, num_ranks: int) -> list[int]:
        heads = self.task.policy.num_heads
        return [size for size in SEQUENCE_PARALLEL if num_ranks % size == 0 and heads % size == 0]

    def _offloads(self) -> tuple[bool, ...]:
        return (True,) if self.task.workload.setup.cpu_offload else (False, True)

    def _fitting(
        self, roles: Iterable[Role], num_ranks: int, parallel: int, micro: int, room: float, *, offloads: bool
    ) -> Setup | None:
        """The policy's settings with which all these roles fit on the same GPUs, if there are any. Versions are staged
        on the GPU if there is room."""
        setup = replace(self.task.workload.setup, micro_batch_tokens=micro, cpu_offload=offloads)
        for staging in ("device", "host"):
            staged = replace(setup, staging=staging)
            if sum(self._need(role, num_ranks, staged, parallel) for role in roles) <= room:
                return replace(staged, micro_batch_tokens=self._tokens("policy", micro, parallel))
        return None

    def _ranks_of(self, roles: list[Role], micro: int, setup: Setup) -> tuple[int, ...]:
        """Numbers of ranks with which the roles of another group fit on their GPUs."""
        given = replace(setup, micro_batch_tokens=micro)
        return tuple(
            num_ranks
            for num_ranks in rank_choices(self.num_gpus)
            if sum(self._need(role, num_ranks, given, 1) for role in roles) <= self._room
        )

    def _useful_ranks(self, groups: list[list[Role]], fitting: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        """Ranks of the other groups. Combinations are left out that are slower than others on as many GPUs, both in
        the forward passes and in the update."""
        key = (tuple(map(tuple, groups)), fitting)
        if key not in self._useful:
            found: list[tuple[tuple[int, ...], float, float]] = [((), 0.0, 0.0)]
            for group, counts in zip(groups, fitting, strict=True):
                sizes = [self.task.shapes[role].active_parameters for role in group]
                trained = self.task.shapes[group[0]].active_parameters if group[0] == "critic" else 0
                found = _undominated(
                    ((*ranks, count), max(forward, sum(sizes) / count), max(update, trained / count))
                    for ranks, forward, update in found
                    for count in counts
                    if sum(ranks) + count < self.num_gpus
                )
            self._useful[key] = [ranks for ranks, _, _ in found]
        return self._useful[key]

    def _smallest_need(self, roles: Iterable[Role], num_ranks: int) -> float:
        smallest = self._micro_batches(1)[-1]
        setup = replace(self.task.workload.setup, micro_batch_tokens=smallest, staging="host")
        return sum(self._need(role, num_ranks, setup, 1) for role in roles)

    def _need(self, role: Role, num_ranks: int, setup: Setup, parallel: int) -> float:
        given = replace(setup, micro_batch_tokens=self._tokens(role, setup.micro_batch_tokens, parallel))
        key = role, num_ranks, given
        if key not in self._bytes:
            moments = role_moments(role, self.task.shapes[role], num_ranks, given)
            self._bytes[key] = total(peak(moments).device) if moments else 0.0
        return self._bytes[key]

    def _tokens(self, role: Role, micro: int, parallel: int) -> int:
        return tokens_of_a_rank(micro, self.task.workload.longest_sequence, parallel, role)

    # ── time ──

    def _train_s(self, groups: list[list[tuple[Role, int]]], setup: Setup, parallel: int) -> float:
        task = self.task
        work = [
            [RoleWork(role, count, task.shapes[role].active_parameters) for role, count in group] for group in groups
        ]
        policy_ranks = work[0][0].num_ranks
        if "reference" in task.shapes and task.reference_is_policy:
            work[0].append(RoleWork("reference", policy_ranks, task.policy.active_parameters))
        trained = [(role, count) for group in groups for role, count in group if role in ("policy", "critic")]
        offload = max(offload_s(role, task.shapes[role], count, task.workload, setup) for role, count in trained)
        exchange = exchange_s(task.policy, task.gpu, policy_ranks, parallel, task.workload)
        return train_s(task.gpu, work, task.workload, setup) + offload + exchange


def _fastest(choices: Iterable[LearnerChoice]) -> Iterator[LearnerChoice]:
    """Those that are faster than every choice with as many GPUs or fewer. Of equal ones, the first."""
    fastest_s = float("inf")
    for choice in sorted(choices, key=lambda choice: (choice.num_gpus, choice.train_s)):
        if choice.train_s < fastest_s:
            fastest_s = choice.train_s
            yield choice


def _undominated(
    combinations: Iterable[tuple[tuple[int, ...], float, float]],
) -> list[tuple[tuple[int, ...], float, float]]:
    """The combinations of ranks, forward time and update time that no other one with as many GPUs or fewer beats."""
    kept: list[tuple[tuple[int, ...], float, float]] = []
    for ranks, forward, update in sorted(combinations, key=lambda entry: (sum(entry[0]), entry[1], entry[2])):
        if not any(other[1] <= forward and other[2] <= update for other in kept):
            kept.append((ranks, forward, update))
    return kept


def server_choices(task: Task, utilization: float, refusals: list[Refusal]) -> Iterator[ServerChoice]:
    """The servers that fit. With fewer groups at once, each of them is ready earlier."""
    model, workload = task.policy, task.workload
    for num_gpus in TENSOR_PARALLEL:
        if model.num_heads % num_gpus:
            continue
        terms = server_plan(model, task.gpu, num_gpus, utilization).terms
        num_sequences = sequences(model, num_gpus, terms, workload)
        if num_sequences < fewest_sequences(workload):
            length = workload.prompt_tokens + workload.response_tokens
            cache = fewest_sequences(workload) * model.kv_bytes_per_token * length / num_gpus
            needed = total(terms[:-1]) + cache
            refusals.append(
                Refusal(
                    f"a server on {num_gpus} GPU{'s' * (num_gpus > 1)}", needed, task.gpu.memory_bytes * utilization
                )
            )
            continue
        groups = max(1, num_sequences // workload.num_samples)
        while groups:
            yield ServerChoice(num_gpus, groups, group_s(model, task.gpu, num_gpus, groups, workload))
            groups //= 2
