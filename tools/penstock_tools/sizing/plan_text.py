"""A plan and the result of a search, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.config.gpu_bundles import num_gpus
from penstock.config.run import RunConfig
from penstock_tools.sizing.hardware import USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import PHASES, MemoryUse, peak, total
from penstock_tools.sizing.models import ModelShape, find_shape
from penstock_tools.sizing.plan import Plan, RolePlan, memory_of, server_plan
from penstock_tools.sizing.rates import Pace
from penstock_tools.sizing.search import Proposal, Result, Task


def as_text(plan: Plan) -> str:
    """The plan as text: GPUs by role with the terms of their memory, rates, forecast, and the config to use."""
    f, model, proposal = plan.forecast, plan.task.policy, plan.proposal
    learner, server = proposal.learner, proposal.server
    lines = [
        f"{model.name} ({_counts(model)}) on {plan.task.gpu.name}, {learner.placement}: {proposal.num_gpus} GPUs",
        f"          P {_count(model.num_parameters)} parameters, L {_count(model.layer_parameters)} in its largest "
        f"layer, R {_count(model.root_parameters)} in embedding and head,",
        f"          E {_count(model.embedding_parameters)} in the embedding, N ranks",
        "",
        *(line for role in (*plan.roles.values(), plan.server) for line in _role_lines(role, plan)),
        "",
        f"rollout   {proposal.num_servers} servers x {server.tensor_parallel} GPU, {server.concurrent_groups} groups "
        f"at once, {server.group_s:.1f} s each: {proposal.num_servers * plan.server_tokens_per_s:,.0f} tokens/s",
        f"learner   {learner.train_s:.1f} s a step without waiting (micro-batches of "
        f"{learner.setup.micro_batch_tokens} tokens), {plan.durations['gather_s']:.2f} s to gather the weights",
        f"push      {plan.durations['push_s']:.2f} s, staged on the {learner.setup.staging}; decoding pauses "
        f"{plan.durations['pause_s'] * 1000:.0f} ms",
        f"expect    {f.step_s:.1f} s a step, learner idle {f.idle_share:.0%}, servers busy {f.busy_share:.0%}, "
        f"staleness {f.staleness_mean:.1f} (at most {f.staleness_max:.0f})",
    ]
    if f.idle_share > 0.2:
        lines.append(
            "          the learner waits for single groups, not for servers: raise max_staleness or groups_per_step, "
            "or lower response_tokens"
        )
    return "\n".join([*lines, "", "config    " + json.dumps(plan.fields)])


def as_json(plan: Plan) -> dict[str, Any]:
    proposal = plan.proposal
    roles = {
        role.role: {
            "num_gpus": role.num_gpus,
            "num_bytes": role.num_bytes,
            "host_bytes": role.host_bytes,
            "terms": [vars(term) for term in role.terms],
            "phases": {moment.phase: total(moment.device) for moment in _fullest(role.moments)},
        }
        for role in (*plan.roles.values(), plan.server)
    }
    return {
        "model": plan.task.policy.name, "gpu": plan.task.gpu.name, "placement": proposal.learner.placement,
        "roles": roles, "num_servers": proposal.num_servers, "concurrent_groups": proposal.server.concurrent_groups,
        "group_s": proposal.server.group_s, "server_tokens_per_s": plan.server_tokens_per_s, **plan.durations,
        "num_gpus": proposal.num_gpus, "setup": vars(proposal.learner.setup), "forecast": plan.forecast.numbers(),
        "config": plan.fields,
    }  # fmt: skip


def _role_lines(role: RolePlan, plan: Plan) -> list[str]:
    """Memory of a role's fullest GPU when it is fullest, term by term, and the peak of each phase."""
    if not role.moments:
        return [f"{role.role:<9} the policy with its adapter switched off: no further memory"]
    shared_with = "critic" if role.role == "reward_model" else "policy"
    where = f"{role.num_gpus} GPU" if role.num_gpus else f"on the {shared_with}'s GPUs"
    memory = f"{role.num_bytes / 1e9:.1f} of {plan.task.gpu.memory_bytes / 1e9:.0f} GB"
    lines = [f"{role.role:<9} {where}, {memory} ({peak(role.moments).what})"]
    for term in role.terms:
        lines.append(f"  {term.name:<45} {term.num_bytes / 1e9:7.2f} GB  {term.formula}".rstrip())
    return [*lines, f"  {phases_text(role)}"]


def phases_text(role: RolePlan) -> str:
    peaks = [f"{moment.phase} {total(moment.device) / 1e9:.1f}" for moment in _fullest(role.moments)]
    return f"{', '.join(peaks)} GB; {role.host_bytes / 1e9:.1f} GB on the host"


def _fullest(moments: Sequence[MemoryUse]) -> list[MemoryUse]:
    present = {moment.phase for moment in moments}
    return [peak(moments, phase) for phase in PHASES if phase in present]


def _counts(model: ModelShape) -> str:
    active = f", {_count(model.active_parameters)} of them active" if model.experts else ""
    return f"{_count(model.num_parameters)} parameters{active}"


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f}e9"


# ── what a search found ──

_COLUMNS = ("", "placement", "learner", "servers", "staleness", "GPUs", "tokens/s", "costs", "why")


def search_text(result: Result) -> str:
    """A table of the best deployment and its alternatives, and what does not fit."""
    workload = result.task.workload
    rows = [_row("best", result.best, result)]
    rows += [_row(change, proposal, result) for change, proposal in result.alternatives.items()]
    lines = [
        f"{result.task.policy.name} on at most {result.num_gpus} {result.task.gpu.name}: {workload.groups_per_step} "
        f"groups of {workload.num_samples} samples a step, prompts of {workload.prompt_tokens} and responses of "
        f"{workload.response_tokens} tokens on average, max_staleness at most {workload.max_staleness}",
        "",
        *_table([_COLUMNS, *rows]),
    ]
    if result.refusals:
        lines += ["", "does not fit:"]
        lines += [
            f"  {refusal.what}: {refusal.needed_bytes / 1e9:.1f} of {refusal.available_bytes / 1e9:.1f} GB"
            for refusal in result.refusals
        ]
    return "\n".join(lines)


def result_json(result: Result, plan: Plan) -> dict[str, Any]:
    others = [{"change": change} | _fields(other, result) for change, other in result.alternatives.items()]
    refusals = [vars(refusal) for refusal in result.refusals]
    return {"best": _fields(result.best, result), "alternatives": others, "refusals": refusals, "plan": as_json(plan)}


def _fields(proposal: Proposal, result: Result) -> dict[str, Any]:
    learner, server = proposal.learner, proposal.server
    return {
        "placement": learner.placement, "ranks": dict(learner.ranks), "sequence_parallel": learner.sequence_parallel,
        "cpu_offload": learner.setup.cpu_offload, "micro_batch_tokens": learner.micro_batch_tokens,
        "staging": learner.setup.staging, "num_servers": proposal.num_servers,
        "tensor_parallel_size": server.tensor_parallel, "max_concurrent_groups": server.concurrent_groups,
        "server_on_learner_gpu": learner.utilization > 0, "max_staleness": proposal.max_staleness,
        "num_gpus": proposal.num_gpus, "step_s": proposal.pace.step_s, "tokens_per_s": proposal.tokens_per_s,
        "cost": result.cost(proposal), "limit": proposal.pace.limit, "learner_idle": proposal.pace.learner_idle,
        "servers_idle": proposal.pace.servers_idle,
    }  # fmt: skip


def _row(name: str, proposal: Proposal, result: Result) -> tuple[str, ...]:
    learner, server = proposal.learner, proposal.server
    servers = f"{proposal.num_servers} x {server.tensor_parallel} GPU"
    if learner.utilization:
        servers = f"on the same GPU, {learner.utilization:.0%} of it"
    return (
        name, learner.placement, _learner(result.task, proposal), servers, str(proposal.max_staleness),
        str(proposal.num_gpus), f"{proposal.tokens_per_s:,.0f}",
        f"{result.cost(proposal):.1%}" if proposal is not result.best else "", _why(proposal.pace),
    )  # fmt: skip


def _learner(task: Task, proposal: Proposal) -> str:
    """The GPUs of each group of roles, and special settings: `policy + reference 24, sequence_parallel 2`."""
    learner, ranks = proposal.learner, dict(proposal.learner.ranks)
    parts = [f"{' + '.join(group)} {ranks[group[0]]}" for group in task.groups_of(learner)]
    parts += [f"sequence_parallel {learner.sequence_parallel}"] if learner.sequence_parallel > 1 else []
    parts += ["cpu_offload"] if learner.setup.cpu_offload else []
    return ", ".join(parts)


def _why(pace: Pace) -> str:
    """What sets the pace, and who waits for it."""
    who = {
        "learner": "the learner is busy",
        "servers": "servers are busy",
        "staleness": "groups take long for this staleness",
    }[pace.limit]
    idle = (("learner", pace.learner_idle), ("servers", pace.servers_idle))
    waiting = [f"{name} idle {share:.0%}" for name, share in idle if share >= 0.005]
    return f"{who}: {', '.join(waiting)}" if waiting else who


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ── the memory of a configuration ──


def config_text(config: RunConfig, gpu: Gpu) -> tuple[str, bool]:
    """The memory of each role of a configuration and of the servers, and whether everything fits.

    A single server may be on the learner's only GPU: `penstock up` does that on a machine with one."""
    lines, groups, whole = [], memory_of(config, gpu), gpu.memory_bytes / 1e9
    for group in groups:
        for role, plan in zip(group.roles.values(), group.plans, strict=True):
            ranks = f"{role.num_ranks} x {role.gpus_per_rank:g} GPU"
            memory = f"{ranks:<12} {phases_text(plan)}" if plan.moments else "memory not known"
            lines.append(f"{plan.role:<13} {memory}")
        used = f"{group.num_bytes / 1e9:.1f} of {whole:.0f} GB on {gpu.name}, {_verdict(group.fits)}"
        lines.append(f"  {' + '.join(group.roles)}: {used}")
    engine, num_servers = config.rollout.engine, config.rollout.num_servers
    size = engine.tensor_parallel_size
    server = server_plan(find_shape(str(config.model.path)), gpu, size, engine.gpu_memory_utilization)
    cache = server.terms[-1].num_bytes
    num_for_learner = num_gpus(config.learner.placement, config.learner.needed_roles)
    lines += [
        f"{'rollout':<13} {f'{num_servers} x {size} GPU':<12} {server.num_bytes / 1e9:.1f} of {whole:.0f} GB on "
        f"{gpu.name}, {cache / 1e9:.1f} of it KV cache, {_verdict(cache > 0)}",
        f"GPUs          {num_for_learner} for the learner, {num_servers * size} for the servers",
    ]
    both = sum(group.num_bytes for group in groups) + server.num_bytes
    if (num_for_learner, num_servers, size) == (1, 1, 1) and both <= gpu.memory_bytes * USABLE_MEMORY:
        lines.append(f"              or both on one GPU: {both / 1e9:.1f} of {whole:.0f} GB, fits")
    return "\n".join(lines), cache > 0 and all(group.fits for group in groups)


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"
