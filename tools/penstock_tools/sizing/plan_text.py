"""A plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock_tools.sizing.memory_terms import PHASES, Moment, peak, total
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.placement.proposed_plan import plan_fields
from penstock_tools.sizing.planned import Plan, RolePlan


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
        return [f"{role.role:<9} the policy with its adapter switched off: no memory of its own"]
    shared_with = "critic" if role.role == "reward_model" else "policy"
    where = f"{role.num_gpus} GPU" if role.num_gpus else f"on the {shared_with}'s GPUs"
    memory = f"{role.num_bytes / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.0f} GB"
    lines = [f"{role.role:<9} {where}, {memory} ({peak(role.moments).what})"]
    for term in role.terms:
        if term.num_bytes:
            lines.append(f"  {term.name:<45} {term.num_bytes / 1e9:7.2f} GB  {term.formula}".rstrip())
    return [*lines, f"  {phases_text(role.moments)}"]


def phases_text(moments: Sequence[Moment]) -> str:
    """The peaks of all phases in one line."""

    peaks = [f"{moment.phase} {total(moment.device) / 1e9:.1f}" for moment in _fullest(moments)]
    host_bytes = max(total(moment.host) for moment in moments)
    return f"{', '.join(peaks)} GB; {host_bytes / 1e9:.1f} GB on the host"


def _fullest(moments: Sequence[Moment]) -> list[Moment]:
    """The fullest moment of each phase that a role has."""
    present = {moment.phase for moment in moments}
    return [peak(moments, phase) for phase in PHASES if phase in present]


def _counts(model: ModelShape) -> str:
    active = f", {_count(model.active_parameters)} of them active" if model.experts else ""
    return f"{_count(model.num_parameters)} parameters{active}"


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f}e9"
