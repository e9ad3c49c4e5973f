"""Search the deployment with the highest throughput on a budget of GPUs, and say what the alternatives cost.

| chosen                         | how                                                                              |
|--------------------------------|----------------------------------------------------------------------------------|
| placement, ranks, Ulysses,     | every combination that fits (`candidates.py`)                                    |
| offload, tensor parallelism    |                                                                                  |
| servers                        | all remaining GPUs, then as few as keep the same throughput                      |
| groups at once on a server     | as many as the KV cache holds, and halves of that                                |
| staleness                      | the smallest up to the limit that keeps the same throughput                      |

A budget of N GPUs includes every deployment on fewer of them, so more GPUs never give less throughput.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS_PER_NODE
from penstock_tools.sizing.placement.candidates import (
    LearnerChoice,
    Learners,
    Refusal,
    ServerChoice,
    Task,
    server_choices,
)
from penstock_tools.sizing.rates import Pace, pace, push_s

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
        """Share of the best throughput that a proposal gives up."""
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
