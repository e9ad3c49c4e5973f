"""`penstock plan`: estimate how many GPUs a model needs in each placement, and show the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, parse_with_overrides, whole_number

_FIELDS = {
    "max_staleness": ("replay.max_staleness", "largest age of a group in versions; --gpus searches up to it"),
    "lora_rank": ("learner.lora.rank", "train a LoRA adapter of this rank"),
    "master_dtype": ("learner.master_dtype", "float32 (default) or bfloat16"),
}
"""Short names of fields of the configuration."""
DEFAULT_GPU, DEFAULT_MODEL = "h100", "7b"


def main(argv: Sequence[str]) -> int:
    args, overrides = parse_with_overrides(_parser(), argv)
    from penstock.cli.output import to_json
    from penstock.config.gpu_bundles import num_gpus
    from penstock.config.loading import folded, load_overrides, merged, read_layers
    from penstock.errors import ConfigError
    from penstock_tools.sizing import plan
    from penstock_tools.sizing.hardware import GPUS
    from penstock_tools.sizing.rates import PLACEMENTS
    from penstock_tools.sizing.search import cheapest, search

    for is_wrong, why in (
        (args.gpu not in (None, *GPUS), f"--gpu {args.gpu} is not known; choose one of {', '.join(GPUS)}"),
        (args.write and not args.gpus, "--write writes what --gpus found: add --gpus N"),
        (args.model and args.config, "--model and --config both name a model; omit --model, or give --model.path"),
        (args.json and args.config and not args.gpus, "--json prints deployments; add --gpus N"),
    ):
        if is_wrong:
            raise ConfigError(why)
    tokens = {"prompt_tokens": args.prompt_tokens, "response_tokens": args.response_tokens}
    means = {name: value for name, value in tokens.items() if value is not None}
    layers = read_layers(args.config) if args.config else []
    run = folded(layers) if layers else plan.new_run(args.model or DEFAULT_MODEL, means)
    for name, (field, _) in _FIELDS.items():
        if (value := getattr(args, name)) is not None:
            overrides = [f"--{field}={value}", *overrides]
            overrides += [f"--learner.lora.alpha={2 * value}"] * (name == "lora_rank")
    config = load_overrides(run, overrides, layers or "command line")
    gpu = GPUS[args.gpu or DEFAULT_GPU]
    if args.config is not None and args.gpus is None:
        is_on_cpu = args.gpu is None and not num_gpus(config.learner.placement, config.learner.needed_roles)
        text, fits = plan.cpu_text(config) if is_on_cpu else plan.config_text(config, gpu)
        print(text)
        return 0 if fits else 1
    task = plan.task_of(config, gpu, means, is_padded=args.padded)
    placements = [name for name in PLACEMENTS if args.placement in (None, name)]
    if args.gpus is None:
        found = [cheapest(replace(task, placements=(placement,))) for placement in placements]
        plans = [(each, merged(run, plan.chosen_fields(each))) for each in found]
        if args.json:
            print(to_json([plan.as_json(*each) for each in plans]))
        else:
            print("\n\n".join(plan.as_text(*each) for each in plans))
        return 0
    result = search(replace(task, placements=tuple(placements)), args.gpus)
    chosen = plan.chosen_fields(result.best)
    placed = merged(run, chosen)
    if args.write is not None:
        _write(args.write, placed)
    if args.json:
        print(to_json([plan.as_json(result.best, chosen if args.config else placed)]))
        return 0
    print(f"{plan.search_text(result, args.gpus)}\n\n{plan.as_text(result.best, chosen if args.config else placed)}")
    if args.write is not None:
        print(f"\nwrote {args.write}; check it with `penstock up {args.write} --check`")
    return 0


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
        description="Estimate GPUs, memory, throughput, push time and staleness of a run, and show the arithmetic. "
        "Fields of the configuration are set as in other commands: --replay.groups_per_step 128.",
    )
    options: dict[str, dict[str, Any]] = {
        "model": {"help": "135m, 0.5b, 1.5b, 3b, 7b, 14b, 30b-a3b, 32b, 70b, a folder or a Hub id "
                  "(default: 7b)"},
        "config": {"type": Path, "metavar": "FILE", "help": "show the memory of this run's roles, or with --gpus place "
                   "them; exit with 1 if they do not fit"},
        "gpus": {"type": whole_number(1), "metavar": "N",
                 "help": "search the deployment with the highest throughput on N GPUs"},
        "write": {"type": Path, "metavar": "FILE", "help": "with --gpus: write the deployment as a YAML file"},
        "gpu": {"help": f"l40s, a100, h100, h200 or b200 (default: {DEFAULT_GPU}; a --config without GPUs is judged by "
                "this machine's memory)"},
        "placement": {"choices": ("standalone", "split-collocate"), "metavar": "NAME",
                      "help": "plan standalone or split-collocate only (default: both)"},
        "prompt_tokens": {"type": whole_number(1), "metavar": "N", "help": "mean number of prompt tokens"},
        "response_tokens": {"type": whole_number(1), "metavar": "N", "help": "mean number of response tokens"},
        **{name: {"type": str if name == "master_dtype" else whole_number(0 if name == "max_staleness" else 1),
                  "metavar": "VALUE", "help": f"{field}: {text}"} for name, (field, text) in _FIELDS.items()},
        "json": {"action": "store_true", "help": "print JSON"},
        "padded": {"action": "store_true", "help": "the model takes the padded path (docs/models.md)"},
    }  # fmt: skip
    for name, option in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser
