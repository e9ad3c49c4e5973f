"""Turn a proposal of the search into a plan, with its memory term by term and a simulated forecast, and a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_tools.sizing.memory import role_moments
from penstock_tools.sizing.memory_terms import Role, tokens_of_a_rank
from penstock_tools.sizing.placement.candidates import Task
from penstock_tools.sizing.placement.search import Proposal
from penstock_tools.sizing.plan import fleet_of, server_plan
from penstock_tools.sizing.planned import Plan, RolePlan
from penstock_tools.sizing.rates import push_s
from penstock_tools.sizing.simulation import simulate


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
    """GPUs and memory of a role. A role that shares the GPUs of the role before it has none of its own."""
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
