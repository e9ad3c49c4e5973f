"""What a run does in one step, and how long the parts of a step take: decoding, training, the push, and the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from penstock_tools.sizing import hardware
from penstock_tools.sizing.hardware import GPUS_PER_NODE, Gpu
from penstock_tools.sizing.memory import Setup, adapter_parameters
from penstock_tools.sizing.models import ModelShape


@dataclass(frozen=True)
class Workload:
    """What a run does in one step. Numbers of tokens are means."""

    groups_per_step: int = 64
    num_samples: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 1024
    longest_sample: float = 1.8
    """Longest response of a group, as a multiple of the mean. A group is ready when its last sample is."""
    longest_tokens: int = 0
    """Tokens of the longest sample with its prompt. 0: as many as `longest_sample` says."""
    max_staleness: int = 2
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    network_rate: float = 50e9
    """Network bandwidth per GPU between nodes, in bytes per second. The default is 400 Gbit/s."""
    setup: Setup = Setup()
    epochs_per_step: int = 1
    """Passes of the update over a batch."""
    recomputes_log_probs: bool = False
    """Whether the policy has a forward pass before its updates. A step with a single update has none, unless the reward
    has a KL penalty."""

    def num_forwards(self, role: str) -> int:
        """Forward passes of a role over a batch, without those of its updates."""
        return 1 if role != "policy" or self.recomputes_log_probs else 0

    @property
    def tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def response_tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * self.response_tokens

    @property
    def longest_sequence(self) -> int:
        return self.longest_tokens or self.prompt_tokens + round(self.longest_sample * self.response_tokens)


GROUP_VARIATION = 0.3
"""Standard deviation of a group's duration, divided by its mean, that plans assume."""
LONGEST_GROUP = 3.0
"""Longest duration of a group, as a multiple of the mean, that plans assume."""


# ── rollout servers ──


def decode_step_s(model: ModelShape, gpu: Gpu, num_gpus: int, num_running: float, context_tokens: float) -> float:
    """Seconds in which every running sequence gets its next token. The weights and the whole KV cache are read once."""
    read = 2 * model.read_parameters(num_running) + num_running * model.kv_bytes_per_token * context_tokens
    memory_s = read / num_gpus / (gpu.memory_rate * hardware.DECODE_EFFICIENCY)
    compute_s = 2 * model.active_parameters * num_running / num_gpus / (gpu.flops * hardware.PREFILL_EFFICIENCY)
    return hardware.DECODE_FLOOR_S + max(memory_s, compute_s)


def group_s(model: ModelShape, gpu: Gpu, num_gpus: int, concurrent_groups: int, workload: Workload) -> float:
    """Seconds of a group on a server that works on this many. Some samples of each group are finished already."""
    running = concurrent_groups * workload.num_samples / workload.longest_sample
    context_tokens = workload.prompt_tokens + workload.response_tokens / 2
    step_s = decode_step_s(model, gpu, num_gpus, running, context_tokens)
    prefill = (
        2 * model.active_parameters * workload.prompt_tokens / num_gpus / (gpu.flops * hardware.PREFILL_EFFICIENCY)
    )
    return prefill + workload.response_tokens * workload.longest_sample * step_s


# ── learner ──


@dataclass(frozen=True)
class RoleWork:
    """A role of the learner, as its speed sees it."""

    role: str
    num_ranks: int
    active_parameters: int

    @property
    def is_trained(self) -> bool:
        return self.role in ("policy", "critic")


def train_s(gpu: Gpu, groups: Sequence[Sequence[RoleWork]], workload: Workload, setup: Setup) -> float:
    """Seconds of the critical path of a step: all forward passes in parallel, then both updates. Roles of one group
    share GPUs and take turns."""
    update = workload.epochs_per_step * (6 + 2 * setup.recomputed)
    forwards = max(
        sum(2 * workload.num_forwards(role.role) * role.active_parameters / role.num_ranks for role in group)
        for group in groups
    )
    updates = max(
        sum(update * role.active_parameters / role.num_ranks for role in group if role.is_trained) for group in groups
    )
    return (forwards + updates) * workload.tokens_per_step / (gpu.flops * hardware.TRAIN_EFFICIENCY)


def exchange_s(model: ModelShape, gpu: Gpu, num_ranks: int, sequence_parallel: int, workload: Workload) -> float:
    """Seconds in which Ulysses exchanges queries, keys, values and outputs of the policy: in the forward pass of the
    log-probs, if there is one, and in the forward pass, the recomputation and the backward pass of the update."""
    if sequence_parallel == 1:
        return 0.0
    passes = workload.num_forwards("policy") + 3 * workload.epochs_per_step
    num_bytes = 2.0 * passes * model.num_layers * model.attention_size * workload.tokens_per_step / num_ranks
    return num_bytes * (1 - 1 / sequence_parallel) / (gpu.link_rate * hardware.LINK_EFFICIENCY)


def offload_s(role: str, model: ModelShape, num_ranks: int, workload: Workload, setup: Setup) -> float:
    """Seconds that `cpu_offload` adds to a trained role: a rank's weights are copied to the GPU for each pass of a
    micro-batch and its gradients back, and the host updates the weights."""
    if not setup.cpu_offload:
        return 0.0
    tokens = workload.tokens_per_step / num_ranks
    num_micro_batches = max(1, math.ceil(tokens / setup.micro_batch_tokens))
    trained = adapter_parameters(model, setup.lora_rank) if setup.lora_rank else model.num_parameters
    part, size, epochs = 1 / num_ranks, setup.master_bytes, workload.epochs_per_step
    down = (workload.num_forwards(role) + 3 * epochs) * size * model.num_parameters * part
    copied = num_micro_batches * (down + epochs * size * trained * part)
    # AdamW reads weight, gradient and both moments, and writes all but the gradient.
    return copied / hardware.HOST_LINK_RATE + epochs * 7 * size * trained * part / hardware.HOST_MEMORY_RATE


def push_s(
    model: ModelShape, gpu: Gpu, policy_ranks: int, server_gpus: int, setup: Setup, workload: Workload
) -> tuple[float, float, float]:
    """Seconds to gather the weights on rank 0, of the whole push, and of the pause in decoding."""
    size, pushed = model.num_parameters, model.num_parameters
    if setup.lora_rank:
        pushed = adapter_parameters(model, setup.lora_rank)
    network = workload.network_rate * hardware.LINK_EFFICIENCY
    gathering = gpu.link_rate * hardware.LINK_EFFICIENCY if policy_ranks <= GPUS_PER_NODE else network
    gather_s = (2 * size / gathering if policy_ranks > 1 else 0.0) + 2 * pushed / hardware.STAGING_RATE
    pause_s = 2 * size / server_gpus / hardware.LOAD_RATE
    # Weights from host memory are hashed by one thread of each server.
    rate = network if setup.staging == "device" else min(network, hardware.HOST_TRANSFER_RATE)
    return gather_s, hardware.PUSH_FLOOR_S + max(gather_s, 2 * pushed / rate) + pause_s, pause_s


# ── a step ──

Limit = Literal["learner", "servers", "staleness"]


@dataclass(frozen=True)
class Pace:
    """What a step takes at least, for three reasons. The slowest of them sets the pace. `penstock simulate` agrees
    within about a tenth, and adds what chance does."""

    learner_s: float
    """Seconds of a step of a learner that never waits."""
    servers_s: float
    """Seconds in which servers that never wait make the groups of a step."""
    staleness_s: float
    """Seconds of a step if every group begins as soon as `max_staleness` admits it."""

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


def pace(
    learner: tuple[float, float, float, float], group: float, num_slots: int, max_staleness: int, groups_per_step: int
) -> Pace:
    """The pace of a run. `learner` has the seconds of training, gather, push and pause; `group` those of a group while
    its server is full.

    A version admits the groups of the step `max_staleness + 1` steps later. They are generated, trained on, and pushed
    before the version of that step can admit others. With more staleness, the slowest groups of a step matter less:
    the next ones are generated concurrently."""
    training_s, gather_s, whole_push_s, pause_s = learner
    steps = max_staleness + 1
    slowest = 1 + (longest_of(groups_per_step) - 1) / steps
    waves = max(0.0, groups_per_step / num_slots - 1) / steps
    around_s = group * (slowest + waves) + training_s + max(whole_push_s, gather_s) + pause_s
    return Pace(training_s + gather_s, groups_per_step * group / num_slots + pause_s, around_s / steps)


@lru_cache(maxsize=64)
def longest_of(num_groups: int) -> float:
    """The usual duration of the slowest of so many groups, as a multiple of the mean."""
    sigma = math.sqrt(math.log(1 + GROUP_VARIATION**2))
    quantile = NormalDist().inv_cdf(num_groups / (num_groups + 1))
    return max(1.0, min(LONGEST_GROUP, math.exp(sigma * quantile - sigma**2 / 2)))
