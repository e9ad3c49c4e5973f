"""Search the deployment with the highest throughput on a budget of GPUs, and say what the alternatives cost.

| chosen                         | how                                                                              |
|--------------------------------|----------------------------------------------------------------------------------|
| placement, ranks, Ulysses,     | every combination that fits                                                      |
| offload, tensor parallelism,   |                                                                                  |
| staleness up to the limit      |                                                                                  |
| servers                        | all remaining GPUs, then as few as keep the same throughput                      |
| groups at once on a server     | as many as the KV cache holds, and halves of that                                |

A budget of N GPUs includes every deployment on fewer of them, so more GPUs never give less throughput.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS_PER_NODE
from penstock_tools.sizing.memory import OFFLOADS, STAGINGS, Role, Setup, server_memory
from penstock_tools.sizing.rates import Pace, Placement, PlanTask, group_s, pace, push_s, train_s

PARALLEL = (1, 2, 4, 8)
"""Sizes of tensor parallelism and of Ulysses."""
MICRO_BATCH_DIVISORS = (1, 2, 4)
SHARED_UTILIZATIONS = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the memory of a GPU that an engine takes if the learner is on the same GPU."""
FEWEST_SEQUENCES = 32
"""Smallest number of concurrent sequences that justifies the memory of an engine's weights."""
MIN_RELATIVE_THROUGHPUT = 0.95
"""One alternative is the deployment on the fewest GPUs that has this share of the best throughput."""
BUDGETS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of GPUs to try if none is given."""


def rank_choices(most: int) -> list[int]:
    """Numbers of ranks to try: all up to a node, then 12, multiples of a node up to 64, then wider steps."""
    nodes = [12, *range(16, 65, GPUS_PER_NODE)]
    wider = [size for power in range(6, 14) for size in (2**power + 2 ** (power - 1), 2 ** (power + 1))]
    return [size for size in (*range(1, GPUS_PER_NODE + 1), *nodes, *wider) if size <= most]


@dataclass(frozen=True)
class Learner:
    placement: Placement
    groups: tuple[tuple[tuple[Role, ...], int], ...]
    """The roles that share GPUs and the number of these GPUs, beginning with the policy's."""
    setup: Setup
    train_s: float
    utilization: float = 0.0
    """Share of the only GPU that a rollout server takes. 0 if servers have their own GPUs."""

    @property
    def num_gpus(self) -> int:
        return sum(count for _, count in self.groups)

    @property
    def policy_ranks(self) -> int:
        return self.groups[0][1]

    @property
    def ranks(self) -> dict[Role, int]:
        return {role: count for roles, count in self.groups for role in roles}


@dataclass(frozen=True)
class PlannedServer:
    """A rollout server that fits, and the number of groups that it works on."""

    tensor_parallel: int
    concurrent_groups: int
    group_s: float


@dataclass(frozen=True)
class Deployment:
    """A learner and servers that fit, and their pace."""

    task: PlanTask = field(repr=False, compare=False)
    learner: Learner
    server: PlannedServer
    num_servers: int
    max_staleness: int

    @cached_property
    def pace(self) -> Pace:
        """A server on the learner's GPU and the learner take turns."""
        task, server, slots = self.task, self.server, self.num_servers * self.server.concurrent_groups
        seconds = (self.learner.train_s, *self.push_s)
        found = pace(seconds, server.group_s, slots, self.max_staleness, task.workload.groups_per_step)
        if not self.learner.utilization:
            return found
        both_s = found.learner_s + found.servers_s
        return replace(found, learner_s=both_s, servers_s=both_s)

    @property
    def push_s(self) -> tuple[float, float, float]:
        """Seconds of the gather, of the whole push, and of the pause in decoding."""
        return push_s(self.task, self.learner.policy_ranks, self.server.tensor_parallel, self.learner.setup)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens that are trained on, per second."""
        return self.task.workload.groups_per_step * self.task.workload.group_tokens / self.pace.step_s

    @property
    def utilization(self) -> float:
        """Share of its GPUs' memory that a server takes."""
        return self.learner.utilization or self.task.workload.gpu_memory_utilization

    @property
    def num_gpus(self) -> int:
        servers = 0 if self.learner.utilization else self.num_servers * self.server.tensor_parallel
        return self.learner.num_gpus + servers

    @property
    def order(self) -> tuple[float, ...]:
        """Smaller is better: time first, then what is simpler or costs less."""
        setup = self.learner.setup
        return (
            self.pace.step_s, self.num_gpus, self.max_staleness, OFFLOADS.index(setup.offload), setup.sequence_parallel,
            self.server.tensor_parallel, -setup.micro_batch_tokens,
        )  # fmt: skip

    @cached_property
    def trimmed(self) -> Deployment:
        """The deployment without the servers that do not make it faster."""
        return self.with_fewest_servers(self.pace.step_s)

    def with_fewest_servers(self, step_s: float) -> Deployment:
        """The deployment with as few servers as make a step in `step_s`."""
        counts = range(1, self.num_servers)
        index = bisect_left(counts, True, key=lambda count: replace(self, num_servers=count).pace.step_s <= step_s)
        return replace(self, num_servers=index + 1)


# ── candidates: each has its memory checked, and the seconds of its training step computed ──


def learners(task: PlanTask, num_gpus: int) -> Iterator[Learner]:
    """The learners that fit on less than `num_gpus` GPUs, or on one GPU, which they may share with a server. Versions
    are staged on the GPU, and micro-batches are as large as wanted, if there is room."""
    choices = rank_choices(num_gpus)
    offloads = OFFLOADS[OFFLOADS.index(task.workload.setup.offload) :]
    for placement in task.placements:
        groups = task.groups(placement)
        options: list[tuple[list[tuple[Role, ...]], Sequence[int], Sequence[float]]] = [(groups, choices, (0.0,))]
        if placement == "split-collocate" or len(groups) == 1:
            options.append(([tuple(role for group in groups for role in group)], (1,), (0.0, *SHARED_UTILIZATIONS)))
        for sharing, counts, shares in options:
            for num_ranks, share, parallel, offload in product(counts, shares, PARALLEL, offloads):
                if num_ranks % parallel == 0 and task.policy.num_heads % parallel == 0:
                    setup = replace(task.workload.setup, sequence_parallel=parallel, offload=offload)
                    for fitting, others in _fitting(task, sharing, num_ranks, share, setup, choices):
                        if num_ranks + sum(others) < num_gpus + (share > 0):
                            split = tuple(zip(sharing, (num_ranks, *others), strict=True))
                            shared = _shared(task, fitting, split)
                            yield Learner(placement, split, shared, train_s(task, split, shared), share)


def _fitting(
    task: PlanTask, groups: list[tuple[Role, ...]], num_ranks: int, share: float, setup: Setup, choices: Sequence[int]
) -> Iterator[tuple[Setup, tuple[int, ...]]]:
    """The setup with the largest micro-batch with which a policy on this many GPUs fits, and the ranks of the groups
    after the policy's: for each time that they may take, the fewest with which none of them takes longer."""
    setup = replace(setup, longest_sequence=task.workload.longest_sequence)
    room = task.usable_bytes - share * task.gpu.memory_bytes
    for micro, staging in product(_micro_batches(task, setup.sequence_parallel), STAGINGS):
        tried = replace(setup, micro_batch_tokens=micro, staging=staging)
        if task.needed_bytes(groups[0], num_ranks, _shared(task, tried, [(groups[0], num_ranks)])) > room:
            continue
        fitting = [
            [(sum(task.work(group, tried)) / count, count) for count in choices
             if task.needed_bytes(group, count, _shared(task, tried, [(group, count)])) <= room]
            for group in groups[1:]
        ]  # fmt: skip
        if all(fitting):
            limits = {seconds for times in fitting for seconds, _ in times} or {0.0}
            most = max((times[-1][0] for times in fitting), default=0.0)
            for limit in sorted(limits):
                if limit >= most:
                    yield tried, tuple(next(count for seconds, count in times if seconds <= limit) for times in fitting)
            return


def _shared(task: PlanTask, setup: Setup, split: Iterable[tuple[tuple[Role, ...], int]]) -> Setup:
    """The setup in which other roles share long sequences among as many ranks as the policy, if their ranks and heads
    can be divided so."""
    size, is_long = setup.sequence_parallel, setup.longest_sequence > setup.micro_batch_tokens
    able = [role for roles, count in split if is_long and count % size == 0
            for role in roles if role != "policy" and task.shapes[role].num_heads % size == 0]  # fmt: skip
    return replace(setup, sharing=frozenset((role, size) for role in able if size > 1))


def _micro_batches(task: PlanTask, parallel: int) -> list[int]:
    wanted, longest = task.workload.setup.micro_batch_tokens, task.workload.longest_sequence
    sizes = {max(16, wanted // divisor) for divisor in MICRO_BATCH_DIVISORS}
    sizes.add(max(16, min(wanted, -(-longest // parallel))))
    return sorted(sizes, reverse=True)


def num_sequences(task: PlanTask, num_gpus: int, utilization: float) -> int:
    """How many samples a server on so many GPUs decodes at once."""
    cache_bytes = num_gpus * server_memory(task.policy, num_gpus, task.gpu, utilization).device[-1].num_bytes
    sample_bytes = task.policy.kv_bytes_per_token * (task.workload.prompt_tokens + task.workload.response_tokens)
    return int(min(task.workload.max_num_seqs, cache_bytes / sample_bytes))


def servers_on(task: PlanTask, num_gpus: int, utilization: float) -> list[PlannedServer]:
    """The servers with this tensor parallelism that fit. With fewer groups at once, each of them is ready earlier."""
    held, workload = num_sequences(task, num_gpus, utilization), task.workload
    fewest = min(workload.max_num_seqs, max(FEWEST_SEQUENCES, workload.num_samples))
    if task.policy.num_heads % num_gpus or held < fewest:
        return []
    most = max(1, held // workload.num_samples)
    halves = [most >> power for power in range(most.bit_length())]
    return [PlannedServer(num_gpus, groups, group_s(task, num_gpus, groups)) for groups in halves]


# ── the search ──


@dataclass(frozen=True)
class SearchResult:
    best: Deployment
    alternatives: dict[str, Deployment]
    """The best deployments with one decision made differently, by that decision, the fastest first."""
    refusals: list[str]
    """What does not fit, next to what was chosen."""

    def cost(self, other: Deployment) -> float:
        """Share of the best throughput that another deployment loses."""
        return 1 - other.tokens_per_s / self.best.tokens_per_s


DECISIONS: dict[str, Callable[[Deployment], Any]] = {
    "placement": lambda found: found.learner.placement,
    "tensor_parallel_size": lambda found: found.server.tensor_parallel,
    "sequence_parallel": lambda found: found.learner.setup.sequence_parallel,
    "offload": lambda found: found.learner.setup.offload,
    "max_staleness": lambda found: found.max_staleness,
    "policy.num_ranks": lambda found: found.learner.policy_ranks,
}
"""What a search decides, by the names of the configuration."""


def search(task: PlanTask, num_gpus: int) -> SearchResult:
    """Find the best deployment on at most `num_gpus` GPUs. Raises InvalidInput if none fits."""
    tried = list(_deployments(task, num_gpus, learners(task, num_gpus), _step_s))
    refusals = list(_refusals(task, num_gpus))
    if not tried:
        why = refusals[0] if refusals else "roles and servers need more GPUs"
        raise InvalidInput(
            "gpus",
            f"{task.policy.name} does not fit on {num_gpus} {task.gpu.name}: {why}; raise --gpus, take a larger --gpu, "
            "or train an adapter with --lora-rank",
        )
    best = _best(tried)
    changes = {best: ""}
    for name, decided in DECISIONS.items():
        values = sorted({decided(each) for each in tried})
        place = values.index(decided(best))
        if name == "max_staleness":
            values = values[:place]
        elif name == "policy.num_ranks":
            values = values[max(0, place - 1) : place + 2]
        for value in values:
            changed = _best([each for each in tried if decided(each) == value])
            changes.setdefault(changed, f"{name} {str(value).lower()}")
    within_s = best.pace.step_s / MIN_RELATIVE_THROUGHPUT
    enough = (each.with_fewest_servers(within_s) for each in tried if each.pace.step_s <= within_s)
    smallest = min(enough, key=lambda found: (found.num_gpus, found.pace.step_s))
    if smallest.num_gpus < best.num_gpus:
        changes.setdefault(smallest, "fewer GPUs")
    others = {changes[each]: each for each in sorted(changes, key=_step_s) if each != best}
    return SearchResult(best, others, refusals)


def _deployments(
    task: PlanTask, num_gpus: int, fitting: Iterable[Learner], cost: Callable[[Deployment], float]
) -> Iterator[Deployment]:
    """The deployment of the least cost for each learner, tensor parallelism and staleness, with as many servers as
    there is room for. A server is on one node, and the ranks of the learner fill what is left of the nodes."""
    shares = (task.workload.gpu_memory_utilization, *SHARED_UTILIZATIONS)
    servers_of = {(share, size): servers_on(task, size, share) for share, size in product(shares, PARALLEL)}
    whole, rest = divmod(num_gpus, GPUS_PER_NODE)
    for learner in fitting:
        for size in PARALLEL:
            servers = servers_of[learner.utilization or task.workload.gpu_memory_utilization, size]
            on_nodes = whole * (GPUS_PER_NODE // size) + rest // size
            most = min(on_nodes, (num_gpus - learner.num_gpus) // size)
            if learner.utilization:  # the server shares the learner's GPU
                most = int(size == 1)
            for staleness in range(task.workload.max_staleness + 1) if most and servers else ():
                yield min((Deployment(task, learner, server, most, staleness) for server in servers), key=cost)


def _step_s(found: Deployment) -> float:
    return found.pace.step_s


def _best(tried: Sequence[Deployment]) -> Deployment:
    """The fastest, with as few servers as do not make it slower."""
    step_s = min(map(_step_s, tried))
    return min((each.trimmed for each in tried if each.pace.step_s <= step_s), key=lambda found: found.order)


def _refusals(task: PlanTask, num_gpus: int) -> Iterator[str]:
    """The largest policy of each placement that does not fit, and servers that are too small."""
    setup = replace(
        task.workload.setup, micro_batch_tokens=_micro_batches(task, 1)[-1],
        longest_sequence=task.workload.longest_sequence, sequence_parallel=1, staging="host",
    )  # fmt: skip
    for placement in task.placements:
        roles = task.groups(placement)[0]
        needs = {count: task.needed_bytes(roles, count, setup) for count in rank_choices(num_gpus)}
        if too_few := [count for count, needed in needs.items() if needed > task.usable_bytes]:
            memory = f"{needs[too_few[-1]] / 1e9:.1f} of {task.usable_bytes / 1e9:.1f} GB"
            yield f"{placement}, {' and '.join(roles)} on {too_few[-1]} GPU{'s' * (too_few[-1] > 1)}: {memory}"
    utilization = task.workload.gpu_memory_utilization
    for size in PARALLEL:
        if task.policy.num_heads % size == 0 and not servers_on(task, size, utilization):
            held = num_sequences(task, size, utilization)
            yield f"servers on {size} GPU{'s' * (size > 1)}: the KV cache holds {held} samples, too few to be worth it"


def cheapest(task: PlanTask) -> Deployment:
    """The deployment that trains on the most tokens per GPU-second, on at most the budget after the first of `BUDGETS`
    on which one fits. Servers have their own GPUs. Ulysses is not used, nor is offload unless the task has it."""

    def cost(found: Deployment) -> float:
        return found.trimmed.num_gpus * found.pace.step_s

    def plain(num_gpus: int) -> Iterator[Deployment]:
        fitting = (
            each
            for each in learners(task, num_gpus)
            if each.setup.sequence_parallel == 1
            and each.setup.offload == task.workload.setup.offload
            and not each.utilization
        )
        return _deployments(task, num_gpus, fitting, cost)

    for fewest, most in pairwise(BUDGETS):
        if any(plain(fewest)):
            return min(plain(most), key=lambda found: (cost(found), found.order)).trimmed
    raise InvalidInput("model", f"{task.policy.name} does not fit on {BUDGETS[-2]} {task.gpu.name}; take larger GPUs")
