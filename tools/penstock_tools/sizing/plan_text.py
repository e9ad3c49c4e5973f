"""A plan as text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from penstock.config.loading import load_config, read_config, validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_tools.sizing.hardware import Gpu
from penstock_tools.sizing.memory import PHASES, MemoryUse, Role, Setup, peak, total
from penstock_tools.sizing.models import HUB_IDS, ModelShape, find_shape
from penstock_tools.sizing.plan import PLACEMENTS, Plan, RolePlan
from penstock_tools.sizing.rates import Pace, Workload
from penstock_tools.sizing.search import Proposal, Result, Task, plan_fields, plan_of, proposal_config, search


def as_text(plan: Plan) -> str:
    """The plan as text: GPUs by role with the terms of their memory, rates, forecast, and the config to use."""
    f, model, setup = plan.forecast, plan.model, plan.setup
    lines = [
        f"{model.name} ({_counts(model)}) on {plan.gpu.name}, {plan.placement}: {plan.num_gpus} GPUs",
        f"          P {_count(model.num_parameters)} parameters, L {_count(model.layer_parameters)} in its largest "
        f"layer, R {_count(model.root_parameters)} in embedding and head,",
        f"          E {_count(model.embedding_parameters)} in the embedding, N ranks",
        "",
        *(line for role in (*plan.learner_roles, plan.server) for line in _role_lines(role, plan)),
        "",
        f"rollout   {plan.num_servers} servers x {plan.server.num_gpus} GPU, {plan.concurrent_groups} groups at once, "
        f"{plan.group_s:.1f} s each: {plan.num_servers * plan.server_tokens_per_s:,.0f} tokens/s",
        f"learner   {plan.train_s:.1f} s a step without waiting (micro-batches of {setup.micro_batch_tokens} tokens), "
        f"{plan.gather_s:.2f} s to gather the weights",
        f"push      {plan.push_s:.2f} s, staged on the {setup.staging}; decoding pauses {plan.pause_s * 1000:.0f} ms",
        f"expect    {f.step_s:.1f} s a step, learner idle {f.idle_share:.0%}, servers busy {f.busy_share:.0%}, "
        f"staleness {f.staleness_mean:.1f} (at most {f.staleness_max:.0f})",
    ]
    if f.idle_share > 0.2:
        lines.append(
            "          the learner waits for single groups, not for servers: raise max_staleness or groups_per_step, "
            "or lower response_tokens"
        )
    return "\n".join([*lines, "", "config    " + json.dumps(plan_fields(plan))])


def as_json(plan: Plan) -> dict[str, Any]:
    roles = {
        role.role: {
            "num_gpus": role.num_gpus,
            "num_bytes": role.num_bytes,
            "host_bytes": role.host_bytes,
            "terms": [vars(term) for term in role.terms],
            "phases": {moment.phase: total(moment.device) for moment in _fullest(role.moments)},
        }
        for role in (*plan.learner_roles, plan.server)
    }
    forecast = {name: value for name, value in vars(plan.forecast).items() if name != "steps"}
    names = ("num_servers", "concurrent_groups", "group_s", "server_tokens_per_s", "train_s", "gather_s", "push_s",
             "pause_s", "num_gpus")  # fmt: skip
    return {
        "model": plan.model.name, "gpu": plan.gpu.name, "placement": plan.placement, "roles": roles,
        **{name: getattr(plan, name) for name in names}, "setup": vars(plan.setup), "forecast": forecast,
        "config": plan_fields(plan),
    }  # fmt: skip


def _role_lines(role: RolePlan, plan: Plan) -> list[str]:
    """Memory of a role's fullest GPU when it is fullest, term by term, and the peak of each phase."""
    if not role.moments:
        return [f"{role.role:<9} the policy with its adapter switched off: no further memory"]
    shared_with = "critic" if role.role == "reward_model" else "policy"
    where = f"{role.num_gpus} GPU" if role.num_gpus else f"on the {shared_with}'s GPUs"
    memory = f"{role.num_bytes / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.0f} GB"
    lines = [f"{role.role:<9} {where}, {memory} ({peak(role.moments).what})"]
    for term in role.terms:
        if term.num_bytes:
            lines.append(f"  {term.name:<45} {term.num_bytes / 1e9:7.2f} GB  {term.formula}".rstrip())
    return [*lines, f"  {phases_text(role.moments)}"]


def phases_text(moments: Sequence[MemoryUse]) -> str:
    """The peaks of all phases in one line."""

    peaks = [f"{moment.phase} {total(moment.device) / 1e9:.1f}" for moment in _fullest(moments)]
    host_bytes = max(total(moment.host) for moment in moments)
    return f"{', '.join(peaks)} GB; {host_bytes / 1e9:.1f} GB on the host"


def _fullest(moments: Sequence[MemoryUse]) -> list[MemoryUse]:
    """The fullest moment of each phase that a role has."""
    present = {moment.phase for moment in moments}
    return [peak(moments, phase) for phase in PHASES if phase in present]


def _counts(model: ModelShape) -> str:
    active = f", {_count(model.active_parameters)} of them active" if model.experts else ""
    return f"{_count(model.num_parameters)} parameters{active}"


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f}e9"


# ── `penstock plan --gpus N`: what is to be placed, and what was found ──

_ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward_model")
_COLUMNS = ("", "placement", "learner", "servers", "staleness", "GPUs", "tokens/s", "costs", "why")


def show_search(args: argparse.Namespace, gpu: Gpu, workload: Workload, given: Mapping[str, int]) -> int:
    """Print the search's result. `given` are the numbers of the workload that flags set."""
    placements = tuple(name for name in PLACEMENTS if args.placement in (None, name))
    if args.config is None:
        task = Task(_shapes_of(find_shape(args.model), workload), gpu, workload, placements)
        base = _new_run(args.model, workload)
    else:
        config, base = load_config(args.config), read_config(args.config)
        task = replace(task_of(config, gpu, workload, given), placements=placements)
    result = search(task, args.gpus)
    plan = plan_of(task, result.best)
    run = proposal_config(plan, base, result.best.learner.utilization or task.workload.gpu_memory_utilization)
    if args.write is not None:
        _write(args.write, run)
    print(json.dumps(result_json(result, plan), indent=2) if args.json else result_text(result, plan))
    if args.write is not None and not args.json:
        print(f"\nwrote {args.write}; check it with `penstock up {args.write} --check`")
    return 0


# ── what is to be placed ──


def _shapes_of(shape: ModelShape, workload: Workload) -> dict[Role, ModelShape]:
    wanted = (True, workload.has_reference, workload.has_critic, workload.has_reward_model)
    return {role: shape for role, is_there in zip(_ROLES, wanted, strict=True) if is_there}


def task_of(config: RunConfig, gpu: Gpu, defaults: Workload, given: Mapping[str, int]) -> Task:
    """The task of a run's configuration. A config only has the longest prompt and response: the means are the flags',
    or what `longest_sample` makes of them. Flags come before the config."""
    if config.learner.roles:
        raise ConfigError(
            "--gpus cannot place the roles of learner.roles: their memory is not known; use --config alone"
        )
    dataset, engine, learner = config.dataset, config.rollout.engine, config.learner
    longest_prompt = config.rollout.prompt.max_tokens or max(1, engine.max_model_len - dataset.max_tokens)
    numbers = {
        "groups_per_step": config.replay.groups_per_step,
        "num_samples": dataset.num_samples,
        "prompt_tokens": min(longest_prompt, defaults.prompt_tokens),
        "response_tokens": max(1, round(dataset.max_tokens / defaults.longest_sample)),
        "max_staleness": config.replay.max_staleness,
        "max_num_seqs": engine.max_num_seqs,
    } | dict(given)
    setup = replace(Setup.of(config), micro_batch_tokens=learner.micro_batch_tokens)
    shapes = {role: find_shape(_path(config, role)) for role in _ROLES if _is_needed(config, role)}
    workload = replace(
        defaults, **numbers, longest_tokens=engine.max_model_len, setup=setup, epochs_per_step=learner.epochs_per_step,
        recomputes_log_probs=learner.recomputes_log_probs, gpu_memory_utilization=engine.gpu_memory_utilization,
        has_reference="reference" in shapes,
        has_critic="critic" in shapes, has_reward_model="reward_model" in shapes,
    )  # fmt: skip
    return Task(shapes, gpu, workload)


def _is_needed(config: RunConfig, role: Role) -> bool:
    learner = config.learner
    return role in learner.needed_roles or (role == "reference" and learner.policy_is_reference)


def _path(config: RunConfig, role: Role) -> str:
    own: Path | None = getattr(getattr(config.learner, role), "path", None)
    return str(own or config.model.path)


def _new_run(model: str, workload: Workload) -> dict[str, Any]:
    """A run with this workload. Its data and reward are for the user to add."""
    kl = (
        {"placement": "loss", "penalty": "k3", "coefficient": 0.001}
        if workload.has_reference
        else {"placement": "none"}
    )
    return {
        "run": "planned",
        "model": {"path": HUB_IDS.get(model.lower(), model), "dtype": "bfloat16"},
        "dataset": {
            "num_samples": workload.num_samples,
            "max_tokens": workload.longest_sequence - workload.prompt_tokens,
        },
        "replay": {"groups_per_step": workload.groups_per_step},
        "rollout": {"engine": {"max_model_len": workload.longest_sequence, "max_num_seqs": workload.max_num_seqs}},
        "learner": {"algorithm": {"kl": kl}},
    }


def _write(file: Path, run: dict[str, Any]) -> None:
    """Write a config that loads."""
    validate(run, str(file))
    head = "# Placement, ranks, servers and staleness are those of `penstock plan --gpus`.\n"
    if not run.get("dataset", {}).get("file"):
        head += "# Add dataset.file and rollout.reward, or submit prompts: docs/datasets.md, docs/rewards.md.\n"
    try:
        file.write_text(head + yaml.safe_dump(run, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write {file} cannot be written: {error.strerror}") from error


# ── what was found ──


def result_text(result: Result, plan: Plan) -> str:
    """The table of the search, and the plan of the best deployment."""
    return f"{search_text(result)}\n\n{as_text(plan)}"


def search_text(result: Result) -> str:
    """A table of the best deployment and its alternatives, and what does not fit."""
    workload = result.task.workload
    rows = [_row("best", result.best, result)]
    rows += [_row(other.change, other.proposal, result) for other in result.alternatives]
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
    others = [{"change": other.change} | _fields(other.proposal, result) for other in result.alternatives]
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
    groups = task.groups(learner.placement)
    parts = [f"{' + '.join(group)} {ranks[group[0]]}" for group in groups]
    if learner.is_packed:
        parts = [f"{' + '.join(role for group in groups for role in group)} 1"]
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
