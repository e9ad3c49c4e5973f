"""Search the deployment with the highest throughput on a budget of GPUs, and say what the alternatives cost.

| chosen                         | how                                                                              |
|--------------------------------|----------------------------------------------------------------------------------|
| placement, ranks, Ulysses,     | every combination that fits                                                     |
| offload, tensor parallelism    |                                                                                  |
| servers                        | all remaining GPUs, then as few as keep the same throughput                      |
| groups at once on a server     | as many as the KV cache holds, and halves of that                                |
| staleness                      | the smallest up to the limit that keeps the same throughput                      |

A budget of N GPUs includes every deployment on fewer of them, so more GPUs never give less throughput.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config.gpu_bundles import RESOURCE_GROUPS
from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS_PER_NODE, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import Role, Setup, peak, role_moments, tokens_of_a_rank, total
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.plan import (
    MICRO_BATCH_DIVISORS,
    PLACEMENTS,
    TENSOR_PARALLEL,
    Placement,
    Plan,
    RolePlan,
    fewest_sequences,
    fleet_of,
    sequences,
    server_plan,
)
from penstock_tools.sizing.rates import Pace, RoleWork, Workload, exchange_s, group_s, offload_s, pace, push_s, train_s
from penstock_tools.sizing.simulation import simulate

# ── candidates: each has its memory checked, and the seconds of its training step computed ──

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
    """Ranks of each role that has its own memory."""
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
        """The learner on one GPU, alone or with a rollout server. Only split-collocate lets models share GPUs."""
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
        """Ranks of the other groups. Combinations are skipped that are slower than others on as many GPUs, both in
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


# ── the search ──

WORTH = 0.95
"""One alternative is the deployment on the fewest GPUs that has this share of the best throughput."""


@dataclass(frozen=True)
class Proposal:
    """A deployment that fits, and its pace."""

    learner: LearnerChoice
    server: ServerChoice
    num_servers: int
    max_staleness: int
    pace: Pace
    tokens_per_s: float
    """Response tokens that are trained on, per second."""

    @property
    def num_gpus(self) -> int:
        shared = self.learner.utilization > 0
        return self.learner.num_gpus + (0 if shared else self.num_servers * self.server.tensor_parallel)

    @property
    def _order(self) -> tuple[float, ...]:
        """Smaller is better: time first, then what is simpler or costs less."""
        learner = self.learner
        return (
            self.pace.step_s, self.num_gpus, self.max_staleness, learner.setup.cpu_offload, learner.sequence_parallel,
            self.server.tensor_parallel, -learner.micro_batch_tokens,
        )  # fmt: skip

    def is_better_than(self, other: Proposal | None) -> bool:
        return other is None or self._order < other._order


@dataclass(frozen=True)
class Alternative:
    """The best deployment with one decision made differently."""

    change: str
    proposal: Proposal


@dataclass(frozen=True)
class Result:
    """What the search found."""

    task: Task
    num_gpus: int
    best: Proposal
    alternatives: tuple[Alternative, ...]
    """The fastest first."""
    refusals: tuple[Refusal, ...]
    """What does not fit, next to what was chosen."""

    def cost(self, proposal: Proposal) -> float:
        """Share of the best throughput that a proposal loses."""
        return 1 - proposal.tokens_per_s / self.best.tokens_per_s


def search(task: Task, num_gpus: int) -> Result:
    """Find the best deployment on at most `num_gpus` GPUs. Raises InvalidInput if none fits."""
    found = _Search(task, num_gpus)
    for learner in found.learners.choices():
        found.add(learner)
    best = found.best.get("best")
    if best is None:
        raise InvalidInput("gpus", found.why_nothing_fits())
    by_proposal: dict[Proposal, Alternative] = {}
    for alternative in found.alternatives(best):
        by_proposal.setdefault(alternative.proposal, alternative)
    ordered = sorted(by_proposal.values(), key=lambda other: other.proposal.pace.step_s)
    return Result(task, num_gpus, best, tuple(ordered), tuple(found.refused_next_to(best)))


@dataclass
class _Search:
    """The best proposal so far, over all and for each value of each decision."""

    task: Task
    num_gpus: int
    best: dict[Hashable, Proposal] = field(default_factory=dict)
    server_refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.learners = Learners(self.task, self.num_gpus)
        self._servers: dict[float, list[list[ServerChoice]]] = {}
        self._all: list[tuple[LearnerChoice, ServerChoice, int, float]] = []
        """Every learner with each tensor parallelism, the most servers, and its step time."""
        self._pushes: dict[tuple[int, int, str], tuple[float, float, float]] = {}

    def add(self, learner: LearnerChoice) -> None:
        """Compare the best deployments with this learner, one for each tensor parallelism and staleness."""
        limit = self.task.workload.max_staleness
        for choices in self._servers_beside(learner):
            num_servers = self._most_servers(learner, choices[0].tensor_parallel)
            if num_servers < 1:
                continue
            for staleness in range(limit + 1):
                paces = [self._pace(learner, choice, num_servers, staleness) for choice in choices]
                index = min(range(len(paces)), key=lambda index: paces[index].step_s)
                keys: list[Hashable] = [("staleness", staleness)]
                if staleness == limit:
                    keys += [
                        "best", ("placement", learner.placement), ("tensor_parallel", choices[0].tensor_parallel),
                        ("ranks", learner.placement, learner.policy_ranks),
                        ("sequence_parallel", learner.sequence_parallel), ("offload", learner.setup.cpu_offload),
                    ]  # fmt: skip
                    self._all.append((learner, choices[index], num_servers, paces[index].step_s))
                self._compare(keys, learner, choices[index], num_servers, staleness, paces[index].step_s)

    def _compare(
        self,
        keys: list[Hashable],
        learner: LearnerChoice,
        server: ServerChoice,
        most: int,
        staleness: int,
        step_s: float,
    ) -> None:
        rivals = [key for key in keys if key not in self.best or step_s <= self.best[key].pace.step_s]
        if not rivals:
            return
        is_limit = staleness == self.task.workload.max_staleness
        proposal = self._trimmed(learner, server, most, staleness, is_fixed=not is_limit)
        for key in rivals:
            if proposal.is_better_than(self.best.get(key)):
                self.best[key] = proposal

    def _trimmed(
        self, learner: LearnerChoice, server: ServerChoice, most: int, staleness: int, *, is_fixed: bool
    ) -> Proposal:
        """Take away staleness, unless it is fixed, and then servers, as long as the step is not slower."""
        step_s = self._pace(learner, server, most, staleness).step_s
        smallest = staleness if is_fixed else 0
        staleness = next(
            fewer
            for fewer in range(smallest, staleness + 1)
            if self._pace(learner, server, most, fewer).step_s <= step_s
        )
        return self._fewest_servers(learner, server, most, staleness, step_s)

    def _fewest_servers(
        self, learner: LearnerChoice, server: ServerChoice, most: int, staleness: int, step_s: float
    ) -> Proposal:
        """The deployment with as few servers as make a step in `step_s`."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._pace(learner, server, middle, staleness).step_s <= step_s:
                high = middle
            else:
                low = middle + 1
        chosen = self._pace(learner, server, high, staleness)
        rate = self.task.workload.response_tokens_per_step / chosen.step_s
        return Proposal(learner, server, high, staleness, chosen, rate)

    def _pace(self, learner: LearnerChoice, server: ServerChoice, num_servers: int, staleness: int) -> Pace:
        size, setup = server.tensor_parallel, learner.setup
        key = learner.policy_ranks, size, setup.staging
        if key not in self._pushes:
            self._pushes[key] = push_s(self.task.policy, self.task.gpu, key[0], size, setup, self.task.workload)
        return pace_of(self.task, learner, server, num_servers, staleness, self._pushes[key])

    def _servers_beside(self, learner: LearnerChoice) -> list[list[ServerChoice]]:
        """The servers that fit, by tensor parallelism. One that shares the learner's GPU is on that GPU only."""
        share = learner.utilization
        if share not in self._servers:
            refusals = self.server_refusals if share == 0 else []
            by_size: defaultdict[int, list[ServerChoice]] = defaultdict(list)
            for choice in server_choices(self.task, share or self.task.workload.gpu_memory_utilization, refusals):
                if not share or choice.tensor_parallel == 1:
                    by_size[choice.tensor_parallel].append(choice)
            self._servers[share] = list(by_size.values())
        return self._servers[share]

    def _most_servers(self, learner: LearnerChoice, tensor_parallel: int) -> int:
        """A server is on one node. The ranks of the learner fill what is left of the nodes."""
        if learner.utilization:
            return 1
        whole, rest = divmod(self.num_gpus, GPUS_PER_NODE)
        on_nodes = whole * (GPUS_PER_NODE // tensor_parallel) + rest // tensor_parallel
        return min(on_nodes, (self.num_gpus - learner.num_gpus) // tensor_parallel)

    # ── alternatives ──

    def alternatives(self, best: Proposal) -> Iterator[Alternative]:
        """The best deployments that differ in one decision, where there are any."""
        learner = best.learner
        for key, change in self._changes(best):
            found = self.best.get(key)
            if found is not None and found != best:
                yield Alternative(change, found)
        cheaper = self._cheapest(best.pace.step_s / WORTH)
        if cheaper is not None and cheaper.num_gpus < best.num_gpus:
            yield Alternative("fewer GPUs", cheaper)
        for staleness in range(best.max_staleness):
            if (found := self.best.get(("staleness", staleness))) is not None:
                yield Alternative(f"max_staleness {staleness}", found)
        ranks = sorted(
            key[2] for key in self.best if isinstance(key, tuple) and key[:2] == ("ranks", learner.placement)
        )
        place = ranks.index(learner.policy_ranks)
        for count in (*ranks[max(0, place - 1) : place], *ranks[place + 1 : place + 2]):
            yield Alternative(f"{count} policy ranks", self.best["ranks", learner.placement, count])

    def _cheapest(self, step_s: float) -> Proposal | None:
        """The deployment on the fewest GPUs whose step takes no longer."""
        limit = self.task.workload.max_staleness
        proposals = [
            self._fewest_servers(learner, server, most, limit, step_s)
            for learner, server, most, fastest_s in self._all
            if fastest_s <= step_s
        ]
        return min(proposals, key=lambda found: (found.num_gpus, found.pace.step_s), default=None)

    def _changes(self, best: Proposal) -> Iterator[tuple[Hashable, str]]:
        for placement in self.task.placements:
            if placement != best.learner.placement:
                yield ("placement", placement), placement
        for size in (1, 2, 4, 8):
            if size != best.server.tensor_parallel:
                yield ("tensor_parallel", size), f"servers on {size} GPU{'s' * (size > 1)}"
        for size in (1, 2, 4, 8):
            if size in (best.learner.sequence_parallel // 2, 2 * best.learner.sequence_parallel):
                yield ("sequence_parallel", size), f"sequence_parallel {size}"
        offloads = not best.learner.setup.cpu_offload
        yield ("offload", offloads), "cpu_offload" if offloads else "no cpu_offload"

    def refused_next_to(self, best: Proposal) -> Iterator[Refusal]:
        """The largest policy of each placement that does not fit, and servers that are too small."""
        for placement in self.task.placements:
            counts = [count for name, count in self.learners.refusals if name == placement]
            if counts:
                refusal = self.learners.refusals[placement, max(counts)]
                yield replace(refusal, what=f"{placement}: {refusal.what}")
        yield from self.server_refusals

    def why_nothing_fits(self) -> str:
        task = self.task
        name = f"{task.policy.name} does not fit on {self.num_gpus} {task.gpu.name}"
        refusals = [*self.server_refusals[-1:], *list(self.learners.refusals.values())[-1:]]
        if not refusals:
            return f"{name}: roles and servers need more GPUs; raise --gpus"
        worst = refusals[-1]
        return (
            f"{name}: it takes {worst.needed_bytes / 1e9:.0f} of {worst.available_bytes / 1e9:.0f} GB to have "
            f"{worst.what}; raise --gpus, take a larger --gpu, or train an adapter with --lora-rank"
        )


def pace_of(
    task: Task,
    learner: LearnerChoice,
    server: ServerChoice,
    num_servers: int,
    max_staleness: int,
    push: tuple[float, float, float] | None = None,
) -> Pace:
    """The pace of a deployment. A server on the learner's GPU and the learner take turns. `push` has the seconds of
    gather, push and pause, if they are known already."""
    workload = task.workload
    gather_s, whole_push_s, pause_s = push or push_s(
        task.policy, task.gpu, learner.policy_ranks, server.tensor_parallel, learner.setup, workload
    )
    durations = (learner.train_s, gather_s, whole_push_s, pause_s)
    slots = num_servers * server.concurrent_groups
    found = pace(durations, server.group_s, slots, max_staleness, workload.groups_per_step)
    if not learner.utilization:
        return found
    both_s = found.learner_s + found.servers_s
    return Pace(both_s, both_s, found.staleness_s)


# ── a proposal as a plan and as a configuration ──


def plan_of(task: Task, proposal: Proposal) -> Plan:
    """The plan of a proposal. Its forecast is simulated, so it differs a little from the proposal's pace."""
    learner, server, gpu = proposal.learner, proposal.server, task.gpu
    workload = replace(task.workload, max_staleness=proposal.max_staleness)
    roles = roles_of(task, proposal)
    push = push_s(task.policy, gpu, learner.policy_ranks, server.tensor_parallel, learner.setup, workload)
    fleet = fleet_of(workload, server.concurrent_groups, server.group_s, (learner.train_s, *push))
    others = tuple(roles[name] for name in ("critic", "reward_model") if name in roles)
    utilization = learner.utilization or workload.gpu_memory_utilization
    rate = server.concurrent_groups * workload.num_samples * workload.response_tokens / server.group_s
    return Plan(
        task.policy, gpu, learner.placement, roles["policy"], roles.get("reference", RolePlan("reference", 0, ())),
        others, server_plan(task.policy, gpu, server.tensor_parallel, utilization), proposal.num_servers,
        learner.setup, server.concurrent_groups, server.group_s, rate, learner.train_s, *push,
        simulate(replace(fleet, num_servers=proposal.num_servers)), sequence_parallel=learner.sequence_parallel,
        is_packed=learner.is_packed, shares_server_gpu=learner.utilization > 0, has_reference="reference" in roles,
        micro_batch_tokens=learner.micro_batch_tokens, max_staleness=proposal.max_staleness,
    )  # fmt: skip


def roles_of(task: Task, proposal: Proposal) -> dict[Role, RolePlan]:
    """GPUs and memory of the learner's roles."""
    return {role: _role(task, proposal, role) for role in task.shapes}


def _role(task: Task, proposal: Proposal, role: Role) -> RolePlan:
    """GPUs and memory of a role. A role that shares the GPUs of the role before it has no GPUs itself."""
    learner = proposal.learner
    num_ranks = dict(learner.ranks).get(role, learner.policy_ranks)
    tokens = tokens_of_a_rank(
        learner.micro_batch_tokens, task.workload.longest_sequence, learner.sequence_parallel, role
    )
    setup = replace(learner.setup, micro_batch_tokens=tokens)
    first = next((group[0] for group in task.groups(learner.placement) if role in group), None)
    has_own = role == "policy" if learner.is_packed else role == first
    return RolePlan(role, num_ranks if has_own else 0, tuple(role_moments(role, task.shapes[role], num_ranks, setup)))


def proposal_config(plan: Plan, given: dict[str, Any], utilization: float) -> dict[str, Any]:
    """The config of a run on this plan: `given`, with the fields that the search chose."""
    chosen: dict[str, Any] = {
        "replay": {"max_staleness": plan.max_staleness},
        "rollout": {"num_servers": plan.num_servers, "engine": {"gpu_memory_utilization": utilization}},
        "learner": {"sequence_parallel": plan.sequence_parallel, "cpu_offload": plan.setup.cpu_offload},
    }
    fields = plan_fields(plan)
    written = given.get("learner", {})
    for name in ("lora", "algorithm"):  # these are not chosen by the search
        if name in written:
            fields["learner"].pop(name, None)
    if "reward_model" in written:
        fields["learner"]["reward_model"].pop("path", None)
    return merged(merged(given, fields), chosen)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """The fields of the run's configuration that a plan sets."""
    setup = plan.setup
    learner: dict[str, Any] = {"placement": plan.placement}
    for name, role in plan.shares.items():
        path = {"path": "/models/reward-model"} if name == "reward_model" else {}
        share = int(role.gpus_per_rank) if role.gpus_per_rank.is_integer() else role.gpus_per_rank
        learner[name] = {**path, "num_ranks": role.num_ranks, "gpus_per_rank": share}
    if "critic" in learner:
        learner["algorithm"] = {"advantage": {"name": "gae"}}
    learner["micro_batch_tokens"] = plan.micro_batch_tokens or setup.micro_batch_tokens
    if setup.lora_rank:
        learner["lora"] = {"rank": setup.lora_rank, "alpha": 2 * setup.lora_rank}
    if setup.master_bytes == 2:
        learner["master_dtype"] = "bfloat16"
    learner |= {
        name: True for name, value in (("compile", setup.compiles), ("cpu_offload", setup.cpu_offload)) if value
    }
    return {
        "learner": learner,
        "rollout": {
            "max_concurrent_groups": plan.concurrent_groups,
            "engine": {"tensor_parallel_size": plan.server.num_gpus},
        },
        "weights": {"staging": setup.staging},
    }


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `other`, section by section."""
    result = dict(base)
    for name, value in other.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result
