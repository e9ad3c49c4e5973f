"""Estimate GPUs, rates and push times for a model, a placement and a workload. Measure before you buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from penstock.config import gpu_bundles
from penstock.config.gpu_bundles import active_resource_groups
from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import MemoryUse, Role, Setup, Term, peak, role_moments, server_terms, total
from penstock_tools.sizing.models import ModelShape, find_shape
from penstock_tools.sizing.rates import GROUP_VARIATION, LONGEST_GROUP, RoleWork, Workload, group_s, push_s, train_s
from penstock_tools.sizing.simulation import FleetModel, Forecast, simulate
from penstock_tools.starter import shares_of_gpus

Placement = Literal["standalone", "split-collocate"]
PLACEMENTS: tuple[Placement, ...] = ("standalone", "split-collocate")


@dataclass(frozen=True)
class RolePlan:
    """GPUs and memory of one role."""

    role: str
    num_gpus: int
    moments: tuple[MemoryUse, ...]
    """The moments at which its fullest rank needs the most memory. Empty if it needs no memory itself."""

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
    sequence_parallel: int = 1
    is_packed: bool = False
    """All roles of the learner are on one GPU, and take turns."""
    shares_server_gpu: bool = False
    """The only server is on that GPU too."""
    has_reference: bool = True
    micro_batch_tokens: int = 0
    """`learner.micro_batch_tokens`. 0: as in `setup`."""
    max_staleness: int = 2

    @property
    def num_gpus(self) -> int:
        """GPUs of the learner's bundles, as Ray places them, and of the servers."""
        num_for_servers = 0 if self.shares_server_gpu else self.num_servers * self.server.num_gpus
        return gpu_bundles.num_gpus(self.placement, self.shares) + num_for_servers

    @property
    def shares(self) -> dict[str, RoleConfig]:
        """Ranks of each role of the learner, and the share of a GPU that each rank gets. Roles that share GPUs have as
        many ranks as the role before them."""
        if self.is_packed:
            names = tuple(role.role for role in self.learner_roles if role.moments)
            packed = shares_of_gpus(names, 1)
            return {name: RoleConfig(num_ranks=1, gpus_per_rank=share.gpus_per_rank) for name, share in packed.items()}
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
        return (self.policy, *((self.reference,) if self.has_reference else ()), *self.others)


def work_groups(roles: Sequence[RolePlan], active_parameters: int) -> list[list[RoleWork]]:
    """The roles by the GPUs that they share. A role without its own GPUs uses those of the role before it."""
    groups: list[list[RoleWork]] = []
    num_ranks = 1
    for role in roles:
        num_ranks = role.num_gpus or num_ranks
        if role.num_gpus:
            groups.append([])
        groups[-1].append(RoleWork(role.role, num_ranks, active_parameters))
    return groups


# ── planning ──

TENSOR_PARALLEL = (1, 2, 4, 8)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
MICRO_BATCH_DIVISORS = (1, 2, 4)
MAX_SERVERS = 4096
FEWEST_SEQUENCES = 32
"""Smallest number of concurrent sequences that justifies the memory of an engine's weights."""


def make_plan(model: ModelShape, gpu: Gpu, placement: Placement, workload: Workload) -> Plan:
    """Find the fewest GPUs on which every role fits, and the number of servers that keeps the learner busy."""
    num_ranks, setup = _fit_policy(model, gpu, placement, workload)
    policy = _role("policy", model, num_ranks, setup)
    reference = _fit_reference(model, gpu, placement, setup, num_ranks, workload)
    others = _fit_others(model, gpu, placement, setup, workload)
    server = _fit_server(model, gpu, workload)
    concurrent_groups = max(1, sequences(model, server.num_gpus, server.terms, workload) // workload.num_samples)
    one_group_s = group_s(model, gpu, server.num_gpus, concurrent_groups, workload)
    roles = (policy, *((reference,) if workload.has_reference else ()), *others)
    training_s = train_s(gpu, work_groups(roles, model.active_parameters), workload, setup)
    gather_s, whole_push_s, pause_s = push_s(model, gpu, num_ranks, server.num_gpus, setup, workload)
    fleet = fleet_of(workload, concurrent_groups, one_group_s, (training_s, gather_s, whole_push_s, pause_s))
    num_servers, forecast = _fit_fleet(fleet)
    rate = concurrent_groups * workload.num_samples * workload.response_tokens / one_group_s
    return Plan(
        model, gpu, placement, policy, reference, others, server, num_servers, setup, concurrent_groups, one_group_s,
        rate, training_s, gather_s, whole_push_s, pause_s, forecast, has_reference=workload.has_reference,
        max_staleness=workload.max_staleness,
    )  # fmt: skip


def fleet_of(
    workload: Workload, concurrent_groups: int, one_group_s: float, learner: tuple[float, float, float, float]
) -> FleetModel:
    """One server and the learner, for the simulation. `learner` has the seconds of training, gather, push and pause."""
    training_s, gather_s, whole_push_s, pause_s = learner
    return FleetModel(
        num_servers=1, concurrent_groups=concurrent_groups, group_s=one_group_s,
        groups_per_step=workload.groups_per_step, max_staleness=workload.max_staleness, train_s=training_s,
        push_s=whole_push_s, gather_s=gather_s, pause_s=pause_s, group_variation=GROUP_VARIATION,
        longest_group=LONGEST_GROUP, num_steps=40,
    )  # fmt: skip


def _role(role: Role, model: ModelShape, num_ranks: int, setup: Setup, *, is_shared: bool = False) -> RolePlan:
    return RolePlan(role, 0 if is_shared else num_ranks, tuple(role_moments(role, model, num_ranks, setup)))


def _fit_policy(model: ModelShape, gpu: Gpu, placement: Placement, workload: Workload) -> tuple[int, Setup]:
    """Find the fewest ranks, then the largest micro-batch. Versions are staged on the GPU if there is room."""
    setup = workload.setup
    choices: tuple[Literal["device", "host"], ...] = ("device", "host")
    for num_ranks in RANKS:
        for divisor in MICRO_BATCH_DIVISORS:
            smaller = replace(setup, micro_batch_tokens=setup.micro_batch_tokens // divisor)
            is_shared = placement == "split-collocate" and workload.has_reference
            shared_bytes = _role("reference", model, num_ranks, smaller).num_bytes if is_shared else 0.0
            for staging in choices:
                staged = replace(smaller, staging=staging)
                needed = _role("policy", model, num_ranks, staged).num_bytes
                if needed + shared_bytes <= gpu.memory_bytes * USABLE_MEMORY:
                    return num_ranks, staged
    raise InvalidInput("model", f"{model.name} does not fit on {RANKS[-1]} {gpu.name}; take larger GPUs")


def _fit_reference(
    model: ModelShape, gpu: Gpu, placement: Placement, setup: Setup, policy_ranks: int, workload: Workload
) -> RolePlan:
    if not workload.has_reference:
        return RolePlan("reference", 0, ())
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

    def cost(plan: RolePlan) -> float:
        step_s = train_s(gpu, work_groups((policy, plan), model.active_parameters), workload, setup)
        return (policy_ranks + plan.num_gpus) * step_s

    return min(fitting, key=cost)


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
    wanted = fewest_sequences(workload)
    for num_gpus in TENSOR_PARALLEL:
        server = server_plan(model, gpu, num_gpus, workload.gpu_memory_utilization)
        if sequences(model, num_gpus, server.terms, workload) >= wanted:
            return server
    raise InvalidInput("model", f"{model.name} leaves no room for {wanted} sequences on {num_gpus} {gpu.name}")


def server_plan(model: ModelShape, gpu: Gpu, num_gpus: int, utilisation: float) -> RolePlan:
    """A rollout server with this tensor parallelism."""
    staged = Term("a version that is being received", "P x 2 B", 2.0 * model.num_parameters)
    terms = tuple(server_terms(model, num_gpus, gpu, utilisation))
    return RolePlan("rollout", num_gpus, (MemoryUse("step", "decoding", terms, (staged,)),))


def fewest_sequences(workload: Workload) -> int:
    """Sequences that a server must have room for."""
    return min(workload.max_num_seqs, max(FEWEST_SEQUENCES, workload.num_samples))


def sequences(model: ModelShape, num_gpus: int, terms: Sequence[Term], workload: Workload) -> int:
    """Sequences that fit into the KV cache of a server at once."""
    length = workload.prompt_tokens + workload.response_tokens
    return int(min(workload.max_num_seqs, terms[-1].num_bytes * num_gpus / (model.kv_bytes_per_token * length)))


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


# ── the memory of a given configuration ──


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one rank of a role."""

    role: str
    shares: RoleConfig
    moments: tuple[MemoryUse, ...]

    @property
    def num_bytes(self) -> float:
        """The most that a rank needs on its GPU."""
        return total(peak(self.moments).device) if self.moments else 0.0


@dataclass(frozen=True)
class GroupMemory:
    """The memory of the roles that share GPUs, on one of them."""

    roles: tuple[RoleMemory, ...]
    gpu: Gpu

    @property
    def num_bytes(self) -> float:
        return sum(role.num_bytes for role in self.roles)

    @property
    def fits(self) -> bool:
        """Whether the first rank of every role fits on the GPUs of its bundle."""
        num_gpus = max(1.0, sum(role.shares.gpus_per_rank for role in self.roles))
        return self.num_bytes <= num_gpus * self.gpu.memory_bytes * USABLE_MEMORY


def memory_of(config: RunConfig, gpu: Gpu) -> list[GroupMemory]:
    """The memory of the learner's roles, by the groups in which they share GPUs."""
    roles = config.learner.needed_roles
    return [
        GroupMemory(tuple(_role_memory(config, name, shares) for name, shares in group.items()), gpu)
        for group in active_resource_groups(config.learner.placement, roles)
    ]


def _role_memory(config: RunConfig, name: str, shares: RoleConfig) -> RoleMemory:
    """The memory of a role. A worker class of the user's own has no moments, because what it holds is not known."""
    own = config.learner.roles.get(name)
    if own is not None and own.is_own_class:
        return RoleMemory(name, shares, ())
    kind = name if own is None else own.worker
    shape = find_shape(str(_folder(config, shares)))
    moments = role_moments(cast(Role, kind), shape, shares.num_ranks, Setup.of(config, name))
    return RoleMemory(name, shares, tuple(moments))


def _folder(config: RunConfig, shares: RoleConfig) -> Path:
    """The model folder of a role: its own, or the policy's."""
    own: Path | None = getattr(shares, "path", None)
    return own or config.model.path
