"""Estimate GPUs, rates and push times for a model, a placement and a workload. Measure before you buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from penstock.errors import InvalidInput
from penstock_tools.sizing.fleet_model import FleetModel, Forecast
from penstock_tools.sizing.hardware import USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import role_moments, server_terms
from penstock_tools.sizing.memory_terms import Moment, Role, Setup, Term
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.planned import Placement, Plan, RolePlan, work_groups
from penstock_tools.sizing.rates import GROUP_VARIATION, LONGEST_GROUP, group_s, push_s, train_s
from penstock_tools.sizing.simulation import simulate
from penstock_tools.sizing.workload import Workload

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
            beside = _role("reference", model, num_ranks, smaller).num_bytes if is_shared else 0.0
            for staging in choices:
                staged = replace(smaller, staging=staging)
                needed = _role("policy", model, num_ranks, staged).num_bytes
                if needed + beside <= gpu.memory_bytes * USABLE_MEMORY:
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
    return RolePlan("rollout", num_gpus, (Moment("step", "decoding", terms, (staged,)),))


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
