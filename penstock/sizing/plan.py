"""Estimate GPUs, rates and push times for a model, a placement and a workload. Measure before you buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.config import gpu_bundles
from penstock.config.learner import RoleConfig
from penstock.errors import InvalidInput
from penstock.sizing import hardware
from penstock.sizing.fleet_model import FleetModel, Forecast
from penstock.sizing.hardware import GPUS_PER_NODE, USABLE_MEMORY, Gpu
from penstock.sizing.memory import role_moments, server_terms
from penstock.sizing.memory_terms import Moment, Role, Setup, Term, adapter_parameters, peak, total
from penstock.sizing.models import ModelShape
from penstock.sizing.simulation import simulate

Placement = Literal["standalone", "split-collocate"]
PLACEMENTS: tuple[Placement, ...] = ("standalone", "split-collocate")
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
MICRO_BATCH_DIVISORS = (1, 2, 4)
MAX_SERVERS = 4096
FEWEST_SEQUENCES = 32
"""Smallest number of concurrent sequences that justifies the memory of an engine's weights."""


@dataclass(frozen=True)
class Workload:
    """What a run does in one step. Numbers of tokens are means."""

    groups_per_step: int = 64
    num_samples: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 1024
    longest_sample: float = 1.8
    """Longest response of a group, as a multiple of the mean. A group is ready when its last sample is."""
    max_staleness: int = 2
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    network_rate: float = 50e9
    """Network bandwidth per GPU between nodes, in bytes per second. The default is 400 Gbit/s."""
    setup: Setup = Setup()
    has_critic: bool = False
    """Whether there is a critic, which has the policy's size."""
    has_reward_model: bool = False
    """Whether there is a reward model, which has the policy's size."""

    @property
    def tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class RolePlan:
    """GPUs and memory of one role."""

    role: str
    num_gpus: int
    moments: tuple[Moment, ...]
    """The moments at which its fullest rank needs the most memory. Empty if it needs none of its own."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the memory of its fullest GPU, when that is fullest."""
        return peak(self.moments).device if self.moments else ()

    @property
    def num_bytes(self) -> float:
        return total(self.terms)

    @property
    def host_bytes(self) -> float:
        """Host memory of its fullest rank, when that needs the most."""
        return max((total(moment.host) for moment in self.moments), default=0.0)


@dataclass(frozen=True)
class Plan:
    """A deployment that fits: roles, servers, durations and what to expect."""

    model: ModelShape
    gpu: Gpu
    placement: Placement
    policy: RolePlan
    reference: RolePlan
    """In split-collocate it shares the policy's GPUs, and its own number is 0. With an adapter it is the policy."""
    others: tuple[RolePlan, ...]
    """Critic and reward model, if there are any. In split-collocate the reward model shares the critic's GPUs."""
    server: RolePlan
    """One rollout server; its number of GPUs is its tensor parallelism."""
    num_servers: int
    setup: Setup
    concurrent_groups: int
    group_s: float
    server_tokens_per_s: float
    train_s: float
    gather_s: float
    push_s: float
    pause_s: float
    forecast: Forecast

    @property
    def num_gpus(self) -> int:
        """GPUs of the learner's bundles, as Ray places them, and of the servers."""
        return gpu_bundles.num_gpus(self.placement, self.shares) + self.num_servers * self.server.num_gpus

    @property
    def shares(self) -> dict[str, RoleConfig]:
        """Ranks of each role of the learner, and the share of a GPU that each rank gets. Roles that share GPUs have as
        many ranks as the role before them."""
        found: dict[str, RoleConfig] = {}
        num_ranks = 1
        for role in self.learner_roles:
            num_ranks = role.num_gpus or num_ranks
            if not role.moments:
                continue
            group = next(names for names in gpu_bundles.RESOURCE_GROUPS[self.placement] if role.role in names)
            sharing = [other.role for other in self.learner_roles if other.role in group and other.moments]
            share = 1.0 if len(sharing) == 1 else (0.75 if role.role == sharing[0] else 0.25)
            found[role.role] = RoleConfig(num_ranks=num_ranks, gpus_per_rank=share)
        return found

    @property
    def learner_roles(self) -> tuple[RolePlan, ...]:
        return (self.policy, self.reference, *self.others)


def make_plan(model: ModelShape, gpu: Gpu, placement: Placement, workload: Workload) -> Plan:
    """Find the fewest GPUs on which every role fits, and the number of servers that keeps the learner busy."""
    num_ranks, setup = _fit_policy(model, gpu, placement, workload.setup)
    policy = _role("policy", model, num_ranks, setup)
    reference = _fit_reference(model, gpu, placement, setup, num_ranks)
    others = _fit_others(model, gpu, placement, setup, workload)
    server = _fit_server(model, gpu, workload)
    concurrent_groups, step_s = _decoding(model, gpu, server, workload)
    group_s = _group_s(model, gpu, server.num_gpus, step_s, workload)
    train_s = _train_s(model, gpu, (policy, reference, *others), workload)
    gather_s, push_s, pause_s = _push(model, gpu, num_ranks, server.num_gpus, setup, workload)
    fleet = FleetModel(
        num_servers=1, concurrent_groups=concurrent_groups, group_s=group_s, groups_per_step=workload.groups_per_step,
        max_staleness=workload.max_staleness, train_s=train_s, push_s=push_s, gather_s=gather_s, pause_s=pause_s,
        group_variation=0.3, longest_group=3.0, num_steps=40,
    )  # fmt: skip
    num_servers, forecast = _fit_fleet(fleet)
    rate = concurrent_groups * workload.num_samples * workload.response_tokens / group_s
    return Plan(
        model, gpu, placement, policy, reference, others, server, num_servers, setup,
        concurrent_groups, group_s, rate, train_s, gather_s, push_s, pause_s, forecast,
    )  # fmt: skip


def _role(role: Role, model: ModelShape, num_ranks: int, setup: Setup, *, is_shared: bool = False) -> RolePlan:
    return RolePlan(role, 0 if is_shared else num_ranks, tuple(role_moments(role, model, num_ranks, setup)))


def _fit_policy(model: ModelShape, gpu: Gpu, placement: Placement, setup: Setup) -> tuple[int, Setup]:
    """Find the fewest ranks, then the largest micro-batch. Versions are staged on the GPU if there is room."""
    choices: tuple[Literal["device", "host"], ...] = ("device", "host")
    for num_ranks in RANKS:
        for divisor in MICRO_BATCH_DIVISORS:
            smaller = replace(setup, micro_batch_tokens=setup.micro_batch_tokens // divisor)
            is_shared = placement == "split-collocate"
            beside = _role("reference", model, num_ranks, smaller).num_bytes if is_shared else 0.0
            for staging in choices:
                staged = replace(smaller, staging=staging)
                needed = _role("policy", model, num_ranks, staged).num_bytes
                if needed + beside <= gpu.memory_bytes * USABLE_MEMORY:
                    return num_ranks, staged
    raise InvalidInput("model", f"{model.name} does not fit on {RANKS[-1]} {gpu.name}; take larger GPUs")


def _fit_reference(model: ModelShape, gpu: Gpu, placement: Placement, setup: Setup, policy_ranks: int) -> RolePlan:
    if placement == "split-collocate" or (setup.lora_rank and setup.policy_is_reference):
        return _role("reference", model, policy_ranks, setup, is_shared=True)
    fitting = [
        plan
        for num_ranks in RANKS
        if (plan := _role("reference", model, num_ranks, setup)).num_bytes <= gpu.memory_bytes * USABLE_MEMORY
    ]
    if not fitting:
        raise InvalidInput("model", f"the reference of {model.name} does not fit on {RANKS[-1]} {gpu.name}")
    # More ranks make the pass faster. Take the number with which a step costs the fewest GPU-seconds.
    policy = RolePlan("policy", policy_ranks, ())
    return min(fitting, key=lambda plan: (policy_ranks + plan.num_gpus) * _step_work((policy, plan)))


def _fit_others(
    model: ModelShape, gpu: Gpu, placement: Placement, setup: Setup, workload: Workload
) -> tuple[RolePlan, ...]:
    """Find the fewest ranks for critic and reward model. In split-collocate they share GPUs."""
    wanted: list[Role] = ["critic"] if workload.has_critic else []
    wanted += ["reward_model"] if workload.has_reward_model else []
    groups = [wanted] if placement == "split-collocate" else [[name] for name in wanted]
    plans: list[RolePlan] = []
    for names in (group for group in groups if group):
        for num_ranks in RANKS:
            fitting = [_role(name, model, num_ranks, setup, is_shared=index > 0) for index, name in enumerate(names)]
            if sum(plan.num_bytes for plan in fitting) <= gpu.memory_bytes * USABLE_MEMORY:
                plans += fitting
                break
        else:
            raise InvalidInput("model", f"{' and '.join(names)} do not fit on {RANKS[-1]} {gpu.name}")
    return tuple(plans)


def _fit_server(model: ModelShape, gpu: Gpu, workload: Workload) -> RolePlan:
    """Find the smallest tensor parallelism that leaves room for enough sequences."""
    wanted = min(workload.max_num_seqs, max(FEWEST_SEQUENCES, workload.num_samples))
    for num_gpus in RANKS[:4]:
        terms = server_terms(model, num_gpus, gpu, workload.gpu_memory_utilization)
        if _sequences(model, num_gpus, terms, workload) >= wanted:
            staged = Term("a version that is being received", "P x 2 B", 2.0 * model.num_parameters)
            return RolePlan("rollout", num_gpus, (Moment("step", "decoding", tuple(terms), (staged,)),))
    raise InvalidInput("model", f"{model.name} leaves no room for {wanted} sequences on {RANKS[3]} {gpu.name}")


def _sequences(model: ModelShape, num_gpus: int, terms: Sequence[Term], workload: Workload) -> int:
    length = workload.prompt_tokens + workload.response_tokens
    return int(min(workload.max_num_seqs, terms[-1].num_bytes * num_gpus / (model.kv_bytes_per_token * length)))


def _decoding(model: ModelShape, gpu: Gpu, server: RolePlan, workload: Workload) -> tuple[int, float]:
    """Number of concurrent groups, and seconds of one decoding step with the samples that are not finished yet."""
    groups = max(1, _sequences(model, server.num_gpus, server.terms, workload) // workload.num_samples)
    running = groups * workload.num_samples / workload.longest_sample
    context_tokens = workload.prompt_tokens + workload.response_tokens / 2
    return groups, decode_step_s(model, gpu, server.num_gpus, running, context_tokens)


def decode_step_s(model: ModelShape, gpu: Gpu, num_gpus: int, num_running: float, context_tokens: float) -> float:
    """Seconds in which every running sequence gets its next token. The weights and the whole KV cache are read once."""
    read = 2 * model.read_parameters(num_running) + num_running * model.kv_bytes_per_token * context_tokens
    memory_s = read / num_gpus / (gpu.memory_rate * hardware.DECODE_EFFICIENCY)
    compute_s = 2 * model.active_parameters * num_running / num_gpus / (gpu.flops * hardware.PREFILL_EFFICIENCY)
    return hardware.DECODE_FLOOR_S + max(memory_s, compute_s)


def _group_s(model: ModelShape, gpu: Gpu, num_gpus: int, step_s: float, workload: Workload) -> float:
    prefill = (
        2 * model.active_parameters * workload.prompt_tokens / num_gpus / (gpu.flops * hardware.PREFILL_EFFICIENCY)
    )
    return prefill + workload.response_tokens * workload.longest_sample * step_s


def _train_s(model: ModelShape, gpu: Gpu, roles: Sequence[RolePlan], workload: Workload) -> float:
    work = model.active_parameters * workload.tokens_per_step / (gpu.flops * hardware.TRAIN_EFFICIENCY)
    return work * _step_work(roles)


def _step_work(roles: Sequence[RolePlan]) -> float:
    """Operations per parameter and token on the critical path of a step: all forward passes in parallel, then both
    updates. A forward pass counts 2, an update 6, and recomputation 2 more. Roles that share GPUs take turns; a role
    without its own GPUs uses those of the role before it."""
    forward: list[float] = []
    update: list[float] = []
    num_gpus = 1
    for role in roles:
        num_gpus = role.num_gpus or num_gpus
        passes = 2 / num_gpus
        if role.num_gpus:
            forward.append(passes)
        else:
            forward[-1] += passes
        update.append(8 / num_gpus if role.role in ("policy", "critic") else 0.0)
    return max(forward) + max(update)


def _push(
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


def _fit_fleet(fleet: FleetModel) -> tuple[int, Forecast]:
    """Choose 10 % more servers than the learner's pace needs, so that it rarely waits for the last group of a step.

    If waiting for single groups makes the learner slower, additional servers would only be idle; then choose enough
    servers for the slower pace."""
    one = fleet.concurrent_groups / fleet.group_s

    def of(groups_per_s: float) -> tuple[int, Forecast]:
        num_servers = min(MAX_SERVERS, max(1, math.ceil(1.1 * groups_per_s / one)))
        return num_servers, simulate(replace(fleet, num_servers=num_servers))

    enough = of(fleet.groups_per_step / (fleet.train_s + fleet.gather_s))
    fewer = of(enough[1].groups_per_s)
    return fewer if fewer[1].step_s <= 1.05 * enough[1].step_s else enough
