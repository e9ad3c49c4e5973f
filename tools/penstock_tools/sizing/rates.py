"""What a run does in one step, and how long the parts of a step take: decoding, training, the push, and the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, cast

from penstock.config.gpu_bundles import pools
from penstock_tools.sizing import hardware
from penstock_tools.sizing.hardware import GPUS_PER_NODE, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import Role, Setup, peak_bytes, trained_parameters
from penstock_tools.sizing.models import ModelShape

Placement = Literal["standalone", "split-collocate"]
PLACEMENTS: tuple[Placement, ...] = ("standalone", "split-collocate")
TRAINED: tuple[Role, ...] = ("policy", "critic")
LONGEST_SAMPLE = 1.8
"""Longest response of a group, as a multiple of the mean. A group is ready when its last sample is."""
GROUP_VARIATION = 0.3
"""Standard deviation of a group's duration, divided by its mean."""
LONGEST_GROUP = 3.0
"""Longest duration of a group, as a multiple of the mean."""


@dataclass(frozen=True)
class Workload:
    """What a run does in one step. Numbers of tokens are means."""

    groups_per_step: int = 64
    num_samples: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 1024
    longest_tokens: int = 0
    """Tokens of the longest sample with its prompt. 0 for as many as `LONGEST_SAMPLE` says."""
    max_staleness: int = 2
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    setup: Setup = Setup()
    passes: Mapping[str, int] = field(default_factory=dict)
    """Passes of a trained role's updates over a batch, if it is not 1."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Updates of a trained role in each pass, if it is not 1."""
    recomputes_log_probs: bool = False
    """Whether the policy has a forward pass before its updates. A step with a single update has none, unless the reward
    has a KL penalty."""

    def num_forwards(self, role: str) -> int:
        """Forward passes of a role over a batch, without those of its updates."""
        return 1 if role != "policy" or self.recomputes_log_probs else 0

    def num_passes(self, role: str) -> int:
        return self.passes.get(role, 1)

    @property
    def tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def group_tokens(self) -> int:
        """Response tokens of a group."""
        return self.num_samples * self.response_tokens

    @property
    def longest_sequence(self) -> int:
        return self.longest_tokens or self.prompt_tokens + round(LONGEST_SAMPLE * self.response_tokens)


@dataclass(frozen=True)
class PlanTask:
    """What is to be placed: the models of a run, its workload, and the kind of GPU."""

    shapes: Mapping[Role, ModelShape]
    """The model of each role that the run has, beginning with the policy."""
    gpu: Gpu
    workload: Workload
    placements: tuple[Placement, ...] = PLACEMENTS
    pools: Mapping[Role, str] = field(default_factory=dict)
    """The pools that roles have chosen."""

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

    def groups(self, placement: Placement) -> list[tuple[Role, ...]]:
        """The roles that share GPUs, beginning with the policy's."""
        present: dict[str, str] = {
            role: self.pools.get(role, "")
            for role in self.shapes
            if not (role == "reference" and self.reference_is_policy)
        }
        return [tuple(cast(Role, role) for role in group) for group in pools(placement, present)]

    def needed_bytes(self, roles: Iterable[Role], num_ranks: int, setup: Setup) -> float:
        """Bytes on the fullest GPU that these roles share."""
        return sum(peak_bytes(role, self.shapes[role], num_ranks, setup) for role in roles)

    def work(self, roles: Iterable[Role], setup: Setup) -> tuple[float, float]:
        """Operations for each token of the forward passes of these roles, and of their updates. A reference that is the
        policy works on the policy's GPUs."""
        also: tuple[Role, ...] = ("reference",) if "reference" in self.shapes and self.reference_is_policy else ()
        working = (*roles, *also) if "policy" in roles else tuple(roles)
        update = 6 + 2 * setup.recomputed
        sizes = {role: self.shapes[role].active_parameters for role in working}
        forwards = sum(2 * self.workload.num_forwards(role) * size for role, size in sizes.items())
        passes = self.workload.num_passes
        return forwards, sum(passes(role) * update * size for role, size in sizes.items() if role in TRAINED)


# ── rollout servers ──


def decode_step_s(model: ModelShape, gpu: Gpu, num_gpus: int, num_running: float, context_tokens: float) -> float:
    """Seconds in which every running sequence gets its next token. The weights and the whole KV cache are read once."""
    read = 2 * model.read_parameters(num_running) + num_running * model.kv_bytes_per_token * context_tokens
    memory_s = read / num_gpus / (gpu.memory_rate * hardware.DECODE_EFFICIENCY)
    compute_s = 2 * model.active_parameters * num_running / num_gpus / (gpu.flops * hardware.PREFILL_EFFICIENCY)
    return hardware.DECODE_FLOOR_S + max(memory_s, compute_s)


def group_s(task: PlanTask, num_gpus: int, concurrent_groups: int) -> float:
    """Seconds of a group on a server that works on this many. Some samples of each group are finished already."""
    workload, model = task.workload, task.policy
    running = concurrent_groups * workload.num_samples / LONGEST_SAMPLE
    context_tokens = workload.prompt_tokens + workload.response_tokens / 2
    step_s = decode_step_s(model, task.gpu, num_gpus, running, context_tokens)
    operations = 2 * model.active_parameters * workload.prompt_tokens
    prefill = operations / num_gpus / (task.gpu.flops * hardware.PREFILL_EFFICIENCY)
    return prefill + workload.response_tokens * LONGEST_SAMPLE * step_s


# ── learner ──


def train_s(task: PlanTask, groups: Sequence[tuple[tuple[Role, ...], int]], setup: Setup) -> float:
    """Seconds of the critical path of a step: all forward passes in parallel, then both updates. `groups` has the roles
    that share GPUs, which take turns, and the number of these GPUs, beginning with the policy's."""
    work = [(*task.work(roles, setup), count) for roles, count in groups]
    operations = max(forward / count for forward, _, count in work) + max(update / count for _, update, count in work)
    ranks = [(role, count) for roles, count in groups for role in roles]
    return (
        operations * task.workload.tokens_per_step / (task.gpu.flops * hardware.TRAIN_EFFICIENCY)
        + max(offload_s(role, task.shapes[role], count, task.workload, setup) for role, count in ranks)
        + exchange_s(task, groups[0][1], setup)
    )


def exchange_s(task: PlanTask, num_ranks: int, setup: Setup) -> float:
    """Seconds in which Ulysses exchanges queries, keys, values and outputs of the policy: in the forward pass of the
    log-probs, if there is one, and in the forward pass, the recomputation and the backward pass of the update."""
    workload, model = task.workload, task.policy
    passes = workload.num_forwards("policy") + 3 * workload.num_passes("policy")
    exchanged = model.num_layers * model.shared_attention_size(setup.sequence_parallel)
    num_bytes = 2.0 * passes * exchanged * workload.tokens_per_step / num_ranks
    return num_bytes * (1 - 1 / setup.sequence_parallel) / (task.gpu.link_rate * hardware.LINK_EFFICIENCY)


def offload_s(role: str, model: ModelShape, num_ranks: int, workload: Workload, setup: Setup) -> float:
    """Seconds that offload adds to a role: each pass of a micro-batch copies weights on the host to the GPU, and
    gradients back. Each update copies what is on the host to the GPU, and all but the gradients back."""
    part, size, passes = 1 / num_ranks, setup.master_bytes, workload.num_passes(role)
    trained = trained_parameters(model, setup.lora_rank_of(role)) * part
    num_updates = passes * workload.parts.get(role, 1)
    num_micro_batches = max(1, math.ceil(workload.tokens_per_step / num_ranks / setup.tokens_of("policy")))
    if role not in TRAINED:
        copied = num_micro_batches * setup.pushed_bytes * model.num_parameters * part if role in setup.on_host else 0.0
        return copied / hardware.HOST_LINK_RATE
    copied = num_updates * (4 * setup.moments_away + 3 * setup.weights_away) * size * trained
    if setup.weights_away:
        down = (workload.num_forwards(role) + 3 * passes) * size * model.num_parameters * part
        copied += num_micro_batches * (down + passes * size * trained)
    return copied / hardware.HOST_LINK_RATE


def push_s(task: PlanTask, policy_ranks: int, server_gpus: int, setup: Setup) -> tuple[float, float, float]:
    """Seconds to gather the weights on rank 0, of the whole push, and of the pause in decoding."""
    size = task.policy.num_parameters
    pushed = trained_parameters(task.policy, setup.lora_rank)
    network = hardware.NETWORK_RATE * hardware.LINK_EFFICIENCY
    gathering = task.gpu.link_rate * hardware.LINK_EFFICIENCY if policy_ranks <= GPUS_PER_NODE else network
    gather_s = (2 * size / gathering if policy_ranks > 1 else 0.0) + 2 * pushed / hardware.STAGING_RATE
    pause_s = 2 * size / server_gpus / hardware.LOAD_RATE
    # Weights from host memory are hashed by one thread of each server.
    rate = network if setup.staging == "device" else min(network, hardware.HOST_TRANSFER_RATE)
    return gather_s, hardware.PUSH_FLOOR_S + max(gather_s, 2 * pushed / rate) + pause_s, pause_s


# ── a step ──

Limit = Literal["learner", "servers", "staleness"]


@dataclass(frozen=True)
class Pace:
    """The steady state of a run. A step takes at least three times, and the largest of them sets the pace."""

    learner_s: float
    """Seconds of a step of a learner that never waits."""
    servers_s: float
    """Seconds in which servers that never wait make the groups of a step."""
    staleness_s: float
    """Seconds of a step if every group begins as soon as `max_staleness` admits it."""
    max_staleness: int
    generation_s: float
    """Seconds in which the groups of a step are generated once they are admitted."""
    delay_s: float
    """Seconds from the sampling of a token until the servers serve what was trained on it, if no one waits."""

    @property
    def step_s(self) -> float:
        return max(self.learner_s, self.servers_s, self.staleness_s)

    @property
    def limit(self) -> Limit:
        names: tuple[Limit, ...] = ("learner", "servers", "staleness")
        return max(names, key=lambda name: float(getattr(self, f"{name}_s")))

    @property
    def learner_idle(self) -> float:
        return 1 - self.learner_s / self.step_s

    @property
    def servers_idle(self) -> float:
        return 1 - self.servers_s / self.step_s

    @property
    def staleness(self) -> float:
        """Mean number of versions between the policy that sampled a token and the policy that trains on it.

        The groups of a step are admitted `max_staleness` versions before it, and get newer versions while they are
        generated. If the learner waits for servers, they start later and are trained on as soon as they are ready."""
        steps = self.generation_s / self.step_s
        whole = math.floor(steps)
        published = (whole * (whole - 1) / 2 + whole * (steps - whole)) / steps
        admitted = max(0.0, self.max_staleness - published)
        return min(admitted, self.delay_s / self.step_s) if self.limit == "servers" else admitted


def pace(
    learner: tuple[float, float, float, float], group: float, num_slots: float, max_staleness: int,
    groups_per_step: int, *, in_order: bool = False,
) -> Pace:  # fmt: skip
    """The pace of a run. `learner` has the seconds of training, gather, push and pause; `group` those of a group while
    its server is full.

    A version admits the groups of the step `max_staleness + 1` steps later. They are generated, trained on, and pushed
    before the version of that step can admit others. With more staleness, the slowest groups of a step matter less: the
    next ones are generated concurrently. They matter as much if groups are trained `in_order` of their admission."""
    training_s, gather_s, whole_push_s, pause_s = learner
    steps, turns, push = max_staleness + 1, groups_per_step / num_slots, max(whole_push_s, gather_s)
    slowest = 1 + (longest_of(groups_per_step) - 1) / (1 if in_order else steps)
    around_s = group * (slowest + max(0.0, turns - 1) / steps) + training_s + push + pause_s
    return Pace(
        learner_s=training_s + gather_s, servers_s=turns * group + pause_s, staleness_s=around_s / steps,
        max_staleness=max_staleness, generation_s=group * max(1.0, turns), delay_s=group / 2 + training_s + push,
    )  # fmt: skip


@lru_cache(maxsize=64)
def longest_of(num_groups: int) -> float:
    """The usual duration of the slowest of so many groups, as a multiple of the mean."""
    sigma = math.sqrt(math.log(1 + GROUP_VARIATION**2))
    quantile = NormalDist().inv_cdf(num_groups / (num_groups + 1))
    return max(1.0, min(LONGEST_GROUP, math.exp(sigma * quantile - sigma**2 / 2)))
