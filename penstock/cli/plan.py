"""`penstock plan`: estimate how many GPUs a model needs in each placement, and show the arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sizing.hardware import Gpu
    from penstock.sizing.memory_terms import Moment
    from penstock.sizing.models import ModelShape
    from penstock.sizing.plan import Plan, RolePlan

_WORKLOAD = {
    "groups_per_step": "groups per step",
    "num_samples": "samples per group",
    "prompt_tokens": "mean number of prompt tokens",
    "response_tokens": "mean number of response tokens",
    "max_staleness": "largest number of versions that a group may be old",
    "max_num_seqs": "maximum number of samples that an engine decodes at once",
}

_SETUP = {
    "micro_batch_tokens": "tokens of a micro-batch; it is made smaller if that saves GPUs",
    "logprob_chunk_tokens": "tokens whose logits are in memory at once",
    "lora_rank": "train a LoRA adapter of this rank instead of the weights",
    "reference_bits": "the reference is quantized to this many bits",
}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    from penstock.errors import ConfigError
    from penstock.sizing.hardware import GPUS
    from penstock.sizing.memory_terms import Setup
    from penstock.sizing.model_folder import find_shape
    from penstock.sizing.plan import PLACEMENTS, Workload, make_plan

    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu} is not known; choose one of {', '.join(GPUS)}")
    if args.config is not None:
        return _show_config(args.config, GPUS[args.gpu])
    given = {name: getattr(args, name) for name in _WORKLOAD if getattr(args, name) is not None}
    chosen_setup = {name: value for name in _SETUP if (value := getattr(args, name)) is not None}
    master_bytes = 2 if args.master_dtype == "bfloat16" else 4
    setup = Setup(**chosen_setup, master_bytes=master_bytes, compiles=args.compile, cpu_offload=args.cpu_offload,
                  is_padded=args.padded)  # fmt: skip
    workload = Workload(
        **given, network_rate=args.network_gbit * 1e9 / 8, setup=setup,
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
        "--model",
        default="7b",
        help="0.5b, 1.5b, 3b, 7b, 14b, 30b-a3b, 32b, 70b, or a model folder (default: %(default)s)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="show the memory of this run's roles instead; 1 if it does not fit"
    )
    parser.add_argument("--gpu", default="h100", help="l40s, a100, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument(
        "--placement", choices=("standalone", "split-collocate"), help="plan this placement only (default: both)"
    )
    for name, text in (_WORKLOAD | _SETUP).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=text)
    parser.add_argument(
        "--master-dtype", choices=("float32", "bfloat16"), default="float32", help="learner.master_dtype"
    )
    parser.add_argument("--compile", action="store_true", help="learner.compile")
    parser.add_argument("--padded", action="store_true", help="the model takes the padded path (docs/models.md)")
    parser.add_argument("--cpu-offload", action="store_true", help="learner.cpu_offload")
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


def _show_config(file: Path, gpu: Gpu) -> int:
    """Print the memory of each role of a configuration. Returns 1 if a group of roles does not fit on its GPUs."""
    from penstock.config.gpu_bundles import num_gpus
    from penstock.config.loading import load_config
    from penstock.sizing.config_memory import memory_of

    config = load_config(file)
    groups = memory_of(config, gpu)
    for group in groups:
        for role in group.roles:
            ranks = f"{role.shares.num_ranks} x {role.shares.gpus_per_rank:g} GPU"
            print(
                f"{role.role:<13} {ranks:<12} {_phases(role.moments)}" if role.moments else f"{role.role:<13} no memory"
            )
        names = " + ".join(role.role for role in group.roles)
        verdict = "fits" if group.fits else "does not fit"
        print(f"  {names}: {group.num_bytes / 1e9:.1f} of {gpu.memory_bytes / 1e9:.0f} GB on {gpu.name}, {verdict}")
    print(f"GPUs          {num_gpus(config.learner.placement, config.learner.needed_roles)}")
    return 0 if all(group.fits for group in groups) else 1


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
    return "\n".join([*lines, "", "config    " + json.dumps(_config(plan))])


def as_json(plan: Plan) -> dict[str, Any]:
    from penstock.sizing.memory_terms import total

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
        "config": _config(plan),
    }  # fmt: skip


def _role_lines(role: RolePlan, plan: Plan) -> list[str]:
    """Memory of a role's fullest GPU when it is fullest, term by term, and the peak of each phase."""
    from penstock.sizing.memory_terms import peak

    if not role.moments:
        return [f"{role.role:<9} the policy with its adapter switched off: no memory of its own"]
    shared_with = "critic" if role.role == "reward_model" else "policy"
    where = f"{role.num_gpus} GPU" if role.num_gpus else f"on the {shared_with}'s GPUs"
    memory = f"{role.num_bytes / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.0f} GB"
    lines = [f"{role.role:<9} {where}, {memory} ({peak(role.moments).what})"]
    for term in role.terms:
        if term.num_bytes:
            lines.append(f"  {term.name:<45} {term.num_bytes / 1e9:7.2f} GB  {term.formula}".rstrip())
    return [*lines, f"  {_phases(role.moments)}"]


def _phases(moments: Sequence[Moment]) -> str:
    """The peaks of all phases in one line."""
    from penstock.sizing.memory_terms import total

    peaks = [f"{moment.phase} {total(moment.device) / 1e9:.1f}" for moment in _fullest(moments)]
    host_bytes = max(total(moment.host) for moment in moments)
    return f"{', '.join(peaks)} GB; {host_bytes / 1e9:.1f} GB on the host"


def _fullest(moments: Sequence[Moment]) -> list[Moment]:
    """The fullest moment of each phase that a role has."""
    from penstock.sizing.memory_terms import PHASES, peak

    present = {moment.phase for moment in moments}
    return [peak(moments, phase) for phase in PHASES if phase in present]


def _counts(model: ModelShape) -> str:
    active = f", {_count(model.active_parameters)} of them active" if model.experts else ""
    return f"{_count(model.num_parameters)} parameters{active}"


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f}e9"


def _config(plan: Plan) -> dict[str, Any]:
    """The fields to set in the run's configuration."""
    setup = plan.setup
    learner: dict[str, Any] = {"placement": plan.placement}
    for name, role in plan.shares.items():
        path = {"path": "/models/reward-model"} if name == "reward_model" else {}
        share = int(role.gpus_per_rank) if role.gpus_per_rank.is_integer() else role.gpus_per_rank
        learner[name] = {**path, "num_ranks": role.num_ranks, "gpus_per_rank": share}
    if "critic" in learner:
        learner["algorithm"] = {"advantage": {"name": "gae"}}
    learner["micro_batch_tokens"] = setup.micro_batch_tokens
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
