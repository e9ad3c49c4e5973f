"""`penstock plan`: estimate how many GPUs a model needs in each placement, and show the arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.parser import Parser

if TYPE_CHECKING:
    from penstock.config.run import RunConfig
    from penstock_tools.sizing.hardware import Gpu

_WORKLOAD = {
    "groups_per_step": "groups per step",
    "num_samples": "samples per group",
    "prompt_tokens": "mean number of prompt tokens",
    "response_tokens": "mean number of response tokens",
    "max_staleness": "largest number of versions that a group may be old; --gpus searches up to it",
    "max_num_seqs": "samples that an engine decodes at once",
}

_SETUP = {
    "micro_batch_tokens": "tokens of a micro-batch; it is made smaller if that saves GPUs",
    "logprob_chunk_tokens": "tokens whose logits are in memory at once",
    "lora_rank": "train a LoRA adapter of this rank",
    "reference_bits": "the reference is quantized to this many bits",
}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    from penstock.errors import ConfigError
    from penstock_tools.sizing.hardware import GPUS
    from penstock_tools.sizing.memory import Setup
    from penstock_tools.sizing.models import find_shape
    from penstock_tools.sizing.plan import PLACEMENTS, make_plan
    from penstock_tools.sizing.plan_text import as_json, as_text
    from penstock_tools.sizing.rates import Workload

    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu} is not known; choose one of {', '.join(GPUS)}")
    if args.write is not None and args.gpus is None:
        raise ConfigError("--write writes what --gpus found: add --gpus N")
    if args.config is not None and args.gpus is None:
        return _show_config(args.config, GPUS[args.gpu])
    given = {name: getattr(args, name) for name in _WORKLOAD if getattr(args, name) is not None}
    chosen_setup = {name: value for name in _SETUP if (value := getattr(args, name)) is not None}
    master_bytes = 2 if args.master_dtype == "bfloat16" else 4
    setup = Setup(**chosen_setup, master_bytes=master_bytes, compiles=args.compile, cpu_offload=args.cpu_offload,
                  is_padded=args.padded)  # fmt: skip
    workload = Workload(
        **given, network_rate=args.network_gbit * 1e9 / 8, setup=setup,
        has_reference=not args.no_reference, has_critic=args.critic, has_reward_model=args.reward_model,
    )  # fmt: skip
    if args.gpus is not None:
        from penstock_tools.sizing.plan_text import show_search

        return show_search(args, GPUS[args.gpu], workload, given)
    model = find_shape(args.model)
    chosen = [name for name in PLACEMENTS if args.placement in (None, name)]
    plans = [make_plan(model, GPUS[args.gpu], placement, workload) for placement in chosen]
    if args.json:
        print(json.dumps([as_json(plan) for plan in plans], indent=2))
    else:
        print("\n\n".join(as_text(plan) for plan in plans))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock plan",
        description="Estimate GPUs, memory, throughput, push time and staleness of a run, and show the arithmetic.",
    )
    parser.add_argument(
        "--model",
        default="7b",
        help="0.5b, 1.5b, 3b, 7b, 14b, 30b-a3b, 32b, 70b, a model folder or a Hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="show the memory of this run's roles, or with --gpus place them; exit with 1 if they do not fit",
    )
    parser.add_argument(
        "--gpus", type=_positive, metavar="N", help="search the deployment with the highest throughput on N GPUs"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="with --gpus: write the deployment as a YAML file")
    parser.add_argument("--gpu", default="h100", help="l40s, a100, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument(
        "--placement", choices=("standalone", "split-collocate"), metavar="NAME",
        help="plan standalone or split-collocate only (default: both)",
    )  # fmt: skip
    for name, text in (_WORKLOAD | _SETUP).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=text)
    parser.add_argument(
        "--master-dtype", choices=("float32", "bfloat16"), default="float32", metavar="DTYPE",
        help="learner.master_dtype: float32 (default) or bfloat16",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="learner.compile")
    parser.add_argument("--padded", action="store_true", help="the model takes the padded path (docs/models.md)")
    parser.add_argument("--cpu-offload", action="store_true", help="learner.cpu_offload")
    parser.add_argument("--no-reference", action="store_true", help="there is no KL penalty, so no reference")
    parser.add_argument("--critic", action="store_true", help="add a critic of the policy's size")
    parser.add_argument("--reward-model", action="store_true", help="add a reward model of the policy's size")
    parser.add_argument(
        "--network-gbit",
        type=float,
        default=400.0,
        metavar="N",
        help="Gbit/s per GPU between nodes (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show_config(file: Path, gpu: Gpu) -> int:
    """Print the memory of each role of a configuration. Returns 1 if a group of roles does not fit on its GPUs."""
    from penstock.config.gpu_bundles import num_gpus
    from penstock.config.loading import load_config
    from penstock_tools.sizing.plan import memory_of
    from penstock_tools.sizing.plan_text import phases_text

    config = load_config(file)
    groups = memory_of(config, gpu)
    for group in groups:
        for role in group.roles:
            ranks = f"{role.shares.num_ranks} x {role.shares.gpus_per_rank:g} GPU"
            print(
                f"{role.role:<13} {ranks:<12} {phases_text(role.moments)}"
                if role.moments
                else f"{role.role:<13} memory not known"
            )
        names = " + ".join(role.role for role in group.roles)
        verdict = "fits" if group.fits else "does not fit"
        print(f"  {names}: {group.num_bytes / 1e9:.1f} of {gpu.memory_bytes / 1e9:.0f} GB on {gpu.name}, {verdict}")
    num_for_learner = num_gpus(config.learner.placement, config.learner.needed_roles)
    server_fits = _show_servers(config, gpu, num_for_learner, sum(group.num_bytes for group in groups))
    return 0 if server_fits and all(group.fits for group in groups) else 1


def _show_servers(config: RunConfig, gpu: Gpu, num_for_learner: int, learner_bytes: float) -> bool:
    """Print the memory of the rollout servers and the number of GPUs. Returns whether a server has room for a cache.

    A single server may be on the learner's only GPU: `penstock up` does that on a machine with one."""
    from penstock_tools.sizing.hardware import USABLE_MEMORY
    from penstock_tools.sizing.models import find_shape
    from penstock_tools.sizing.plan import server_plan

    engine, num_servers = config.rollout.engine, config.rollout.num_servers
    size = engine.tensor_parallel_size
    server = server_plan(find_shape(str(config.model.path)), gpu, size, engine.gpu_memory_utilization)
    cache = server.terms[-1].num_bytes
    verdict = "fits" if cache > 0 else "does not fit"
    print(
        f"{'rollout':<13} {f'{num_servers} x {size} GPU':<12} {server.num_bytes / 1e9:.1f} of "
        f"{gpu.memory_bytes / 1e9:.0f} GB on {gpu.name}, {cache / 1e9:.1f} of it KV cache, {verdict}"
    )
    print(f"GPUs          {num_for_learner} for the learner, {num_servers * size} for the servers")
    both = learner_bytes + server.num_bytes
    if (num_for_learner, num_servers, size) == (1, 1, 1) and both <= gpu.memory_bytes * USABLE_MEMORY:
        print(f"              or both on one GPU: {both / 1e9:.1f} of {gpu.memory_bytes / 1e9:.0f} GB, fits")
    return cache > 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
