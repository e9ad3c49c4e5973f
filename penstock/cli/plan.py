"""`penstock plan`: estimate how many GPUs a model needs in each placement, and show the arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sizing.plan import Plan, RolePlan

_WORKLOAD = {
    "groups_per_step": "groups per step",
    "num_samples": "samples per group",
    "prompt_tokens": "mean number of prompt tokens",
    "response_tokens": "mean number of response tokens",
    "max_staleness": "largest number of versions that a group may be old",
    "max_num_seqs": "maximum number of samples that an engine decodes at once",
}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    from penstock.errors import ConfigError
    from penstock.sizing.hardware import GPUS
    from penstock.sizing.models import find_shape
    from penstock.sizing.plan import PLACEMENTS, Workload, make_plan

    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu} is not known; choose one of {', '.join(GPUS)}")
    given = {name: getattr(args, name) for name in _WORKLOAD if getattr(args, name) is not None}
    workload = Workload(
        **given, network_rate=args.network_gbit * 1e9 / 8,
        has_critic=args.critic, has_reward_model=args.reward_model,
    )  # fmt: skip
    model = find_shape(args.model)
    chosen = [name for name in PLACEMENTS if args.placement in (None, name)]
    plans = [make_plan(model, GPUS[args.gpu], placement, workload) for placement in chosen]
    if args.json:
        print(json.dumps([as_json(plan) for plan in plans], indent=2))
    else:
        print("\n\n".join(as_text(plan) for plan in plans))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock plan",
        description="Estimate GPUs, memory, throughput, push time and staleness of a run, and show the arithmetic.",
    )
    parser.add_argument(
        "--model", default="7b", help="0.5b, 1.5b, 3b, 7b, 14b, 32b, 70b, or a model folder (default: %(default)s)"
    )
    parser.add_argument("--gpu", default="h100", help="l40s, a100, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument(
        "--placement", choices=("standalone", "split-collocate"), help="plan this placement only (default: both)"
    )
    for name, text in _WORKLOAD.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=text)
    parser.add_argument("--critic", action="store_true", help="add a critic of the policy's size")
    parser.add_argument("--reward-model", action="store_true", help="add a reward model of the policy's size")
    parser.add_argument(
        "--network-gbit",
        type=float,
        default=400.0,
        help="network bandwidth per GPU between nodes, in Gbit/s (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def as_text(plan: Plan) -> str:
    """The plan as text: GPUs by role with the terms of their memory, rates, forecast, and the config to use."""
    f = plan.forecast
    lines = [
        f"{plan.model.name} ({plan.model.num_parameters / 1e9:.2f}e9 parameters) on {plan.gpu.name}, {plan.placement}: "
        f"{plan.num_gpus} GPUs",
        "",
        *(line for role in (*plan.learner_roles, plan.server) for line in _role_lines(role, plan)),
        "",
        f"rollout   {plan.num_servers} servers x {plan.server.num_gpus} GPU, {plan.concurrent_groups} groups at once, "
        f"{plan.group_s:.1f} s each: {plan.num_servers * plan.server_tokens_per_s:,.0f} tokens/s",
        f"learner   {plan.train_s:.1f} s a step without waiting (micro-batches of {plan.micro_batch_tokens} tokens), "
        f"{plan.gather_s:.2f} s to gather the weights",
        f"push      {plan.push_s:.2f} s, staged on the {plan.staging}; decoding pauses {plan.pause_s * 1000:.0f} ms",
        f"expect    {f.step_s:.1f} s a step, learner idle {f.idle_share:.0%}, servers busy {f.busy_share:.0%}, "
        f"staleness {f.staleness_mean:.1f} (at most {f.staleness_max:.0f})",
    ]
    if f.idle_share > 0.2:
        lines.append(
            "          the learner waits for single groups, not for servers: raise max_staleness or groups_per_step, "
            "or lower response_tokens"
        )
    return "\n".join([*lines, "", "config    " + json.dumps(_config(plan))])


def as_json(plan: Plan) -> dict[str, Any]:
    roles = {
        role.role: {
            "num_gpus": role.num_gpus,
            "num_bytes": role.num_bytes,
            "terms": [vars(term) for term in role.terms],
        }
        for role in (*plan.learner_roles, plan.server)
    }
    forecast = {name: value for name, value in vars(plan.forecast).items() if name != "steps"}
    names = ("num_servers", "micro_batch_tokens", "concurrent_groups", "group_s", "server_tokens_per_s", "train_s",
             "gather_s", "push_s", "pause_s", "staging", "num_gpus")  # fmt: skip
    return {
        "model": plan.model.name, "gpu": plan.gpu.name, "placement": plan.placement, "roles": roles,
        **{name: getattr(plan, name) for name in names}, "forecast": forecast, "config": _config(plan),
    }  # fmt: skip


def _role_lines(role: RolePlan, plan: Plan) -> list[str]:
    shared_with = "critic" if role.role == "reward_model" else "policy"
    where = f"{role.num_gpus} GPU" if role.num_gpus else f"on the {shared_with}'s GPUs"
    lines = [f"{role.role:<9} {where}, {role.num_bytes / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.0f} GB"]
    for term in role.terms:
        if term.num_bytes:
            lines.append(f"  {term.name:<45} {term.num_bytes / 1e9:7.2f} GB  {term.formula}".rstrip())
    return lines


def _config(plan: Plan) -> dict[str, Any]:
    """The fields to set in the run's configuration."""
    roles: dict[str, Any] = {}
    num_ranks = 1
    for role in plan.learner_roles:
        num_ranks = role.num_gpus or num_ranks
        first = plan.others[0].role if plan.others else "policy"
        is_shared = plan.placement == "split-collocate" and (
            role.role in ("policy", "reference") or len(plan.others) > 1
        )
        share = (0.75 if role.role in ("policy", first) else 0.25) if is_shared else 1
        path = {"path": "/models/reward-model"} if role.role == "reward_model" else {}
        roles[role.role] = {**path, "num_ranks": num_ranks, "gpus_per_rank": share}
    if "critic" in roles:
        roles["algorithm"] = {"advantage": {"name": "gae"}}
    return {
        "learner": {"placement": plan.placement, **roles, "micro_batch_tokens": plan.micro_batch_tokens},
        "rollout": {
            "max_concurrent_groups": plan.concurrent_groups,
            "engine": {"tensor_parallel_size": plan.server.num_gpus},
        },
        "weights": {"staging": plan.staging},
    }


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
