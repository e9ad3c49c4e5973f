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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from penstock.config.gpu_bundles import RESOURCE_GROUPS
from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS_PER_NODE, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import Role, Setup, peak, role_moments, server_terms, tokens_of_a_rank, total
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.rates import Pace, RoleWork, Workload, exchange_s, group_s, offload_s, pace, push_s, train_s

Placement = Literal["standalone", "split-collocate"]
PLACEMENTS: tuple[Placement, ...] = ("standalone", "split-collocate")
PARALLEL = (1, 2, 4, 8)
"""Sizes of tensor parallelism and of Ulysses."""
MICRO_BATCH_DIVISORS = (1, 2, 4)
SHARED_UTILIZATIONS = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the memory of a GPU that an engine takes if the learner is on the same GPU."""
FEWEST_SEQUENCES = 32
"""Smallest number of concurrent sequences that justifies the memory of an engine's weights."""
WORTH = 0.95
"""One alternative is the deployment on the fewest GPUs that has this share of the best throughput."""
T = TypeVar("T")


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
    def usable_bytes(self) -> float:
        return self.gpu.memory_bytes * USABLE_MEMORY

    @property
    def reference_is_policy(self) -> bool:
        """The reference is the policy with its adapter switched off. It has no ranks, but its pass takes time."""
        return bool(self.workload.setup.lora_rank) and self.workload.setup.policy_is_reference

    def groups(self, placement: Placement) -> list[list[Role]]:
        """The roles that share GPUs, beginning with the policy's."""
        present = [role for role in self.shapes if not (role == "reference" and self.reference_is_policy)]
        groups = [[role for role in present if role in names] for names in RESOURCE_GROUPS[placement]]
        return [group for group in groups if group]

    def groups_of(self, learner: LearnerChoice) -> list[list[Role]]:
        return [[role for role, _ in learner.ranks]] if learner.is_packed else self.groups(learner.placement)


@dataclass(frozen=True)
class LearnerChoice:
    placement: Placement
    ranks: tuple[tuple[Role, int], ...]
    setup: Setup
    micro_batch_tokens: int
    sequence_parallel: int
    num_gpus: int
    train_s: float
    is_packed: bool = False
    """All roles are on one GPU, and take turns."""
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
    what: str
    needed_bytes: float
    available_bytes: float


# ── candidates: each has its memory checked, and the seconds of its training step computed ──


class Learners:
    """Enumerates the learners of a task that fit on at most `num_gpus` GPUs, with the numbers of ranks in `ranks`.
    Remembers what did not fit."""

    def __init__(self, task: Task, num_gpus: int, ranks: Sequence[int]) -> None:
        self.task = task
        self.num_gpus = num_gpus
        self.ranks = ranks
        self.refusals: dict[tuple[Placement, int], Refusal] = {}
        """The policies that do not fit by any micro-batch, by placement and ranks, without offload and Ulysses."""
        self._bytes: dict[tuple[Role, int, Setup], float] = {}
        self._useful: dict[Hashable, list[tuple[int, ...]]] = {}

    def choices(self) -> Iterator[LearnerChoice]:
        """Yield a learner only if it is faster than every smaller one that differs from it only in the GPUs of the
        other roles or in the micro-batch."""
        for placement in self.task.placements:
            for num_ranks in self.ranks:
                for parallel, offloads in itertools.product(self._parallel(num_ranks), self._offloads()):
                    found = self.of_policy(placement, num_ranks, parallel, offloads=offloads)
                    yield from _undominated(found, lambda choice: (choice.num_gpus, choice.train_s))
            yield from self._packed(placement)

    def of_policy(
        self, placement: Placement, num_ranks: int, parallel: int, *, offloads: bool
    ) -> Iterator[LearnerChoice]:
        """All learners with this policy, the largest micro-batches first."""
        first, *others = self.task.groups(placement)
        seen = set()
        for micro in self._micro_batches(parallel):
            setup = self._fitting(first, num_ranks, parallel, micro, self.task.usable_bytes, offloads=offloads)
            if setup is None:
                continue
            fitting = tuple(self._ranks_of(group, micro, setup) for group in others)
            if (setup.staging, fitting) in seen:  # a smaller micro-batch that makes nothing possible
                continue
            seen.add((setup.staging, fitting))
            for counts in self._useful_ranks(others, fitting):
                if num_ranks + sum(counts) <= self.num_gpus:
                    groups = zip([first, *others], (num_ranks, *counts), strict=True)
                    yield self._choice(placement, list(groups), setup, micro, parallel)
        smallest = replace(self.task.workload.setup, micro_batch_tokens=self._micro_batches(1)[-1], staging="host")
        needed = self._need(first, num_ranks, smallest, 1)
        if parallel == 1 and not offloads and needed > self.task.usable_bytes:
            what = f"{' and '.join(first)} on {num_ranks} GPU{'s' * (num_ranks > 1)}"
            self.refusals[placement, num_ranks] = Refusal(what, needed, self.task.usable_bytes)

    def _packed(self, placement: Placement) -> Iterator[LearnerChoice]:
        """The learner on one GPU, alone or with a rollout server. Only split-collocate lets models share GPUs."""
        groups = self.task.groups(placement)
        if placement == "standalone" and len(groups) > 1:
            return
        roles = [role for group in groups for role in group]
        for share, offloads in itertools.product((0.0, *SHARED_UTILIZATIONS), self._offloads()):
            room = self.task.usable_bytes - share * self.task.gpu.memory_bytes
            for micro in self._micro_batches(1):
                setup = self._fitting(roles, 1, 1, micro, room, offloads=offloads)
                if setup is not None:
                    alone = self._choice(placement, [(roles, 1)], setup, micro, 1)
                    yield replace(alone, is_packed=True, utilization=share)
                    break

    def _choice(
        self, placement: Placement, groups: list[tuple[list[Role], int]], setup: Setup, micro: int, parallel: int
    ) -> LearnerChoice:
        """The learner with these roles and ranks on the GPUs of each group."""
        task, shapes, workload = self.task, self.task.shapes, self.task.workload
        work = [[RoleWork(role, count, shapes[role].active_parameters) for role in group] for group, count in groups]
        ranks = tuple((role, count) for group, count in groups for role in group)
        if "reference" in shapes and task.reference_is_policy:
            work[0].append(RoleWork("reference", groups[0][1], task.policy.active_parameters))
        trained = [(role, count) for role, count in ranks if role in ("policy", "critic")]
        seconds = train_s(task.gpu, work, workload, setup)
        seconds += max(offload_s(role, shapes[role], count, workload, setup) for role, count in trained)
        seconds += exchange_s(task.policy, task.gpu, groups[0][1], parallel, workload)
        num_gpus = sum(count for _, count in groups)
        return LearnerChoice(placement, ranks, setup, micro, parallel, num_gpus, seconds)

    def _micro_batches(self, parallel: int) -> list[int]:
        wanted, longest = self.task.workload.setup.micro_batch_tokens, self.task.workload.longest_sequence
        sizes = {max(16, wanted // divisor) for divisor in MICRO_BATCH_DIVISORS}
        sizes.add(max(16, min(wanted, -(-longest // parallel))))
        return sorted(sizes, reverse=True)

    def _parallel(self, num_ranks: int) -> list[int]:
        heads = self.task.policy.num_heads
        return [size for size in PARALLEL if num_ranks % size == 0 and heads % size == 0]

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
            if self._need(roles, num_ranks, staged, parallel) <= room:
                return replace(staged, micro_batch_tokens=self._tokens("policy", micro, parallel))
        return None

    def _ranks_of(self, roles: list[Role], micro: int, setup: Setup) -> tuple[int, ...]:
        """Numbers of ranks with which the roles of another group fit on their GPUs."""
        given = replace(setup, micro_batch_tokens=micro)
        return tuple(count for count in self.ranks if self._need(roles, count, given, 1) <= self.task.usable_bytes)

    def _useful_ranks(self, groups: list[list[Role]], fitting: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        """Ranks of the other groups. Combinations are skipped that are slower than others on as many GPUs, both in the
        forward passes and in the update."""
        key = (tuple(map(tuple, groups)), fitting)
        if key not in self._useful:
            found: list[tuple[tuple[int, ...], float, float]] = [((), 0.0, 0.0)]
            for group, counts in zip(groups, fitting, strict=True):
                sizes = [self.task.shapes[role].active_parameters for role in group]
                trained = sizes[0] if group[0] == "critic" else 0
                combined = (
                    ((*ranks, count), max(forward, sum(sizes) / count), max(update, trained / count))
                    for ranks, forward, update in found
                    for count in counts
                    if sum(ranks) + count < self.num_gpus
                )
                found = _undominated(combined, lambda entry: (sum(entry[0]), *entry[1:]))
            self._useful[key] = [ranks for ranks, _, _ in found]
        return self._useful[key]

    def _need(self, roles: Iterable[Role], num_ranks: int, setup: Setup, parallel: int) -> float:
        needed = 0.0
        for role in roles:
            given = replace(setup, micro_batch_tokens=self._tokens(role, setup.micro_batch_tokens, parallel))
            key = role, num_ranks, given
            if key not in self._bytes:
                moments = role_moments(role, self.task.shapes[role], num_ranks, given)
                self._bytes[key] = total(peak(moments).device) if moments else 0.0
            needed += self._bytes[key]
        return needed

    def _tokens(self, role: Role, micro: int, parallel: int) -> int:
        return tokens_of_a_rank(micro, self.task.workload.longest_sequence, parallel, role)


def _undominated(entries: Iterable[T], costs: Callable[[T], tuple[float, ...]]) -> list[T]:
    """The entries that no other one beats, or equals, in all costs. The first cost is the number of GPUs."""
    kept: list[tuple[T, tuple[float, ...]]] = []
    for entry in sorted(entries, key=costs):
        own = costs(entry)[1:]
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for _, other in kept):
            kept.append((entry, own))
    return [entry for entry, _ in kept]


def server_choices(task: Task, utilization: float, refusals: list[Refusal]) -> Iterator[ServerChoice]:
    """The servers that fit. With fewer groups at once, each of them is ready earlier."""
    model, workload = task.policy, task.workload
    fewest = min(workload.max_num_seqs, max(FEWEST_SEQUENCES, workload.num_samples))
    sequence_bytes = model.kv_bytes_per_token * (workload.prompt_tokens + workload.response_tokens)
    for num_gpus in PARALLEL:
        if model.num_heads % num_gpus:
            continue
        *fixed, cache = server_terms(model, num_gpus, task.gpu, utilization)
        num_sequences = int(min(workload.max_num_seqs, cache.num_bytes * num_gpus / sequence_bytes))
        if num_sequences < fewest:
            needed = total(fixed) + fewest * sequence_bytes / num_gpus
            what = f"a server on {num_gpus} GPU{'s' * (num_gpus > 1)}"
            refusals.append(Refusal(what, needed, task.gpu.memory_bytes * utilization))
            continue
        groups = max(1, num_sequences // workload.num_samples)
        while groups:
            yield ServerChoice(num_gpus, groups, group_s(model, task.gpu, num_gpus, groups, workload))
            groups //= 2


# ── the search ──


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

    @classmethod
    def of(cls, task: Task, learner: LearnerChoice, server: ServerChoice, num_servers: int, staleness: int) -> Proposal:
        found = pace_of(task, learner, server, num_servers, staleness)
        rate = task.workload.response_tokens_per_step / found.step_s
        return cls(learner, server, num_servers, staleness, found, rate)

    @property
    def num_gpus(self) -> int:
        shared = self.learner.utilization > 0
        return self.learner.num_gpus + (0 if shared else self.num_servers * self.server.tensor_parallel)

    @property
    def order(self) -> tuple[float, ...]:
        """Smaller is better: time first, then what is simpler or costs less."""
        learner = self.learner
        return (
            self.pace.step_s, self.num_gpus, self.max_staleness, learner.setup.cpu_offload, learner.sequence_parallel,
            self.server.tensor_parallel, -learner.micro_batch_tokens,
        )  # fmt: skip


def pace_of(task: Task, learner: LearnerChoice, server: ServerChoice, num_servers: int, max_staleness: int) -> Pace:
    """The pace of a deployment. A server on the learner's GPU and the learner take turns."""
    push = push_s(task.policy, task.gpu, learner.policy_ranks, server.tensor_parallel, learner.setup, task.workload)
    slots = num_servers * server.concurrent_groups
    found = pace((learner.train_s, *push), server.group_s, slots, max_staleness, task.workload.groups_per_step)
    if not learner.utilization:
        return found
    both_s = found.learner_s + found.servers_s
    return Pace(both_s, both_s, found.staleness_s)


@dataclass(frozen=True)
class Result:
    task: Task
    num_gpus: int
    best: Proposal
    alternatives: dict[str, Proposal]
    """The best deployments with one decision made differently, by that decision, the fastest first."""
    refusals: tuple[Refusal, ...]
    """What does not fit, next to what was chosen."""

    def cost(self, proposal: Proposal) -> float:
        """Share of the best throughput that a proposal gives up."""
        return 1 - proposal.tokens_per_s / self.best.tokens_per_s


def search(task: Task, num_gpus: int) -> Result:
    """Find the best deployment on at most `num_gpus` GPUs. Raises InvalidInput if none fits."""
    found = _Search(task, num_gpus, Learners(task, num_gpus, rank_choices(num_gpus)))
    for learner in found.learners.choices():
        found.add(learner)
    best = found.best.get("best")
    if best is None:
        raise InvalidInput("gpus", found.why_nothing_fits())
    changes: dict[Proposal, str] = {}
    for change, proposal in found.changes(best):
        if proposal is not None and proposal != best:
            changes.setdefault(proposal, change)
    ordered = sorted(changes, key=lambda proposal: proposal.pace.step_s)
    return Result(task, num_gpus, best, {changes[each]: each for each in ordered}, tuple(found.refused()))


@dataclass
class _Search:
    """The best proposal so far, over all and for each value of each decision."""

    task: Task
    num_gpus: int
    learners: Learners
    best: dict[Hashable, Proposal] = field(default_factory=dict)
    server_refusals: list[Refusal] = field(default_factory=list)
    _servers: dict[float, list[list[ServerChoice]]] = field(default_factory=dict)
    _all: list[tuple[LearnerChoice, ServerChoice, int, float]] = field(default_factory=list)
    """Every learner with each tensor parallelism, the most servers, and its step time."""

    def add(self, learner: LearnerChoice) -> None:
        """Compare the best deployments with this learner, one for each tensor parallelism and staleness."""
        limit = self.task.workload.max_staleness
        for choices in self._servers_for(learner):
            size = choices[0].tensor_parallel
            most = self._most_servers(learner, size)
            for staleness in range(limit + 1) if most else ():
                paces = [(self._step_s(learner, choice, most, staleness), choice) for choice in choices]
                step_s, server = min(paces, key=lambda entry: entry[0])
                keys: list[Hashable] = [("staleness", staleness)]
                if staleness == limit:
                    keys += [
                        "best", ("placement", learner.placement), ("tensor_parallel", size),
                        ("ranks", learner.placement, learner.policy_ranks),
                        ("sequence_parallel", learner.sequence_parallel), ("offload", learner.setup.cpu_offload),
                    ]  # fmt: skip
                    self._all.append((learner, server, most, step_s))
                rivals = [key for key in keys if key not in self.best or step_s <= self.best[key].pace.step_s]
                if rivals:
                    proposal = self._trimmed(learner, server, most, staleness, step_s, is_fixed=staleness < limit)
                    for key in rivals:
                        if key not in self.best or proposal.order < self.best[key].order:
                            self.best[key] = proposal

    def _step_s(self, learner: LearnerChoice, server: ServerChoice, num_servers: int, staleness: int) -> float:
        return pace_of(self.task, learner, server, num_servers, staleness).step_s

    def _trimmed(
        self, learner: LearnerChoice, server: ServerChoice, most: int, staleness: int, step_s: float, *, is_fixed: bool
    ) -> Proposal:
        """Take away staleness, unless it is fixed, and then servers, as long as the step is not slower."""
        fewer = (less for less in range(staleness) if self._step_s(learner, server, most, less) <= step_s)
        chosen = staleness if is_fixed else next(fewer, staleness)
        return self._fewest_servers(learner, server, most, chosen, step_s)

    def _fewest_servers(
        self, learner: LearnerChoice, server: ServerChoice, most: int, staleness: int, step_s: float
    ) -> Proposal:
        """The deployment with as few servers as make a step in `step_s`."""
        index = bisect_left(
            range(1, most), True, key=lambda count: self._step_s(learner, server, count, staleness) <= step_s
        )
        return Proposal.of(self.task, learner, server, index + 1, staleness)

    def _servers_for(self, learner: LearnerChoice) -> list[list[ServerChoice]]:
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

    def changes(self, best: Proposal) -> Iterator[tuple[str, Proposal | None]]:
        """The best deployments that differ in one decision. The first name of a deployment is the best."""
        learner, by = best.learner, self.best.get
        for placement in self.task.placements:
            yield placement, by(("placement", placement))
        for size in PARALLEL:
            yield f"servers on {size} GPU{'s' * (size > 1)}", by(("tensor_parallel", size))
        for size in (learner.sequence_parallel // 2, 2 * learner.sequence_parallel):
            yield f"sequence_parallel {size}", by(("sequence_parallel", size))
        offloads = not learner.setup.cpu_offload
        yield "cpu_offload" if offloads else "no cpu_offload", by(("offload", offloads))
        yield "fewer GPUs", self._cheaper(best)
        for staleness in range(best.max_staleness):
            yield f"max_staleness {staleness}", by(("staleness", staleness))
        ranks = sorted(
            key[2] for key in self.best if isinstance(key, tuple) and key[:2] == ("ranks", learner.placement)
        )
        place = ranks.index(learner.policy_ranks)
        for count in (*ranks[max(0, place - 1) : place], *ranks[place + 1 : place + 2]):
            yield f"{count} policy ranks", by(("ranks", learner.placement, count))

    def _cheaper(self, best: Proposal) -> Proposal | None:
        """The deployment on the fewest GPUs that has most of the best throughput, if it needs fewer."""
        within_s, limit = best.pace.step_s / WORTH, self.task.workload.max_staleness
        enough = [entry[:3] for entry in self._all if entry[3] <= within_s]
        proposals = (self._fewest_servers(*entry, limit, within_s) for entry in enough)
        cheapest = min(proposals, key=lambda found: (found.num_gpus, found.pace.step_s), default=best)
        return cheapest if cheapest.num_gpus < best.num_gpus else None

    def refused(self) -> Iterator[Refusal]:
        """The largest policy of each placement that does not fit, and servers that are too small."""
        for placement in self.task.placements:
            counts = [count for name, count in self.learners.refusals if name == placement]
            if counts:
                refusal = self.learners.refusals[placement, max(counts)]
                yield replace(refusal, what=f"{placement}: {refusal.what}")
        yield from self.server_refusals

    def why_nothing_fits(self) -> str:
        name = f"{self.task.policy.name} does not fit on {self.num_gpus} {self.task.gpu.name}"
        refusals = [*self.server_refusals[-1:], *list(self.learners.refusals.values())[-1:]]
        if not refusals:
            return f"{name}: roles and servers need more GPUs; raise --gpus"
        worst = refusals[-1]
        return (
            f"{name}: it takes {worst.needed_bytes / 1e9:.0f} of {worst.available_bytes / 1e9:.0f} GB to have "
            f"{worst.what}; raise --gpus, take a larger --gpu, or train an adapter with --lora-rank"
        )
