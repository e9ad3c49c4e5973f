"""`penstock plan`: estimate how many GPUs a model needs in each placement, and show the arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, whole_number

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

_SWITCHES = {
    "compile": "learner.compile",
    "padded": "the model takes the padded path (docs/models.md)",
    "cpu-offload": "learner.cpu_offload",
    "no-reference": "there is no KL penalty, so no reference",
    "critic": "add a critic of the policy's size",
    "reward-model": "add a reward model of the policy's size",
}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    from penstock.config.loading import load_config, read_config
    from penstock.errors import ConfigError
    from penstock_tools.sizing.hardware import GPUS
    from penstock_tools.sizing.memory import Setup
    from penstock_tools.sizing.models import find_shape
    from penstock_tools.sizing.plan import ROLES, Plan, new_run, smallest_plan, task_of
    from penstock_tools.sizing.plan_text import as_json, as_text, config_text, result_json, search_text
    from penstock_tools.sizing.rates import Workload
    from penstock_tools.sizing.search import PLACEMENTS, Task, search

    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu} is not known; choose one of {', '.join(GPUS)}")
    if args.write is not None and args.gpus is None:
        raise ConfigError("--write writes what --gpus found: add --gpus N")
    gpu = GPUS[args.gpu]
    if args.config is not None and args.gpus is None:
        text, fits = config_text(load_config(args.config), gpu)
        print(text)
        return 0 if fits else 1
    given, chosen = ({name: value for name in names if (value := getattr(args, name)) is not None}
                     for names in (_WORKLOAD, _SETUP))  # fmt: skip
    setup = Setup(**chosen, master_bytes=2 if args.master_dtype == "bfloat16" else 4, compiles=args.compile,
                  cpu_offload=args.cpu_offload, is_padded=args.padded)  # fmt: skip
    workload = Workload(**given, network_rate=args.network_gbit * 1e9 / 8, setup=setup)
    if args.config is None:
        absent = {"reference": args.no_reference, "critic": not args.critic, "reward_model": not args.reward_model}
        shape = find_shape(args.model)
        task = Task({role: shape for role in ROLES if not absent.get(role)}, gpu, workload)
        run = new_run(args.model, task)
    else:
        task, run = task_of(load_config(args.config), gpu, workload, given), read_config(args.config)
    task = replace(task, placements=tuple(name for name in PLACEMENTS if args.placement in (None, name)))
    if args.gpus is None:
        plans = [smallest_plan(replace(task, placements=(placement,))) for placement in task.placements]
        _print(args, [as_json(plan) for plan in plans], "\n\n".join(map(as_text, plans)))
        return 0
    result = search(task, args.gpus)
    plan = Plan(task, result.best)
    if args.write is not None:
        _write(args.write, plan.config(run))
    _print(args, result_json(result, plan), f"{search_text(result)}\n\n{as_text(plan)}")
    if args.write is not None and not args.json:
        print(f"\nwrote {args.write}; check it with `penstock up {args.write} --check`")
    return 0


def _print(args: argparse.Namespace, record: Any, text: str) -> None:
    print(json.dumps(record, indent=2) if args.json else text)


def _write(file: Path, run: dict[str, Any]) -> None:
    """Write a config that loads."""
    import yaml

    from penstock.config.loading import validate
    from penstock.errors import ConfigError

    validate(run, str(file))
    head = "# Placement, ranks, servers and staleness are those of `penstock plan --gpus`.\n"
    if not run.get("dataset", {}).get("file"):
        head += "# Add dataset.file and rollout.reward, or submit prompts: docs/datasets.md, docs/rewards.md.\n"
    try:
        file.write_text(head + yaml.safe_dump(run, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write {file} cannot be written: {error.strerror}") from error


def _parser() -> Parser:
    parser = Parser(
        prog="penstock plan",
        description="Estimate GPUs, memory, throughput, push time and staleness of a run, and show the arithmetic.",
    )
    parser.add_argument(
        "--model", default="7b",
        help="0.5b, 1.5b, 3b, 7b, 14b, 30b-a3b, 32b, 70b, a model folder or a Hub id (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="show the memory of this run's roles, or with --gpus place them; exit with 1 if they do not fit",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=whole_number(1), metavar="N", help="search the deployment with the highest throughput on N GPUs"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="with --gpus: write the deployment as a YAML file")
    parser.add_argument("--gpu", default="h100", help="l40s, a100, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument(
        "--placement", choices=("standalone", "split-collocate"), metavar="NAME",
        help="plan standalone or split-collocate only (default: both)",
    )  # fmt: skip
    for name, text in (_WORKLOAD | _SETUP).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole_number(1), metavar="N", help=text)
    parser.add_argument(
        "--master-dtype", choices=("float32", "bfloat16"), default="float32", metavar="DTYPE",
        help="learner.master_dtype: float32 (default) or bfloat16",
    )  # fmt: skip
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--network-gbit", type=float, default=400.0, metavar="N",
        help="Gbit/s per GPU between nodes (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
