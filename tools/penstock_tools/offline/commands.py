"""`penstock generate FILE --model FOLDER --output FILE` samples answers to every prompt of a dataset file. After an
interruption, the same command generates only the missing rows. Several engines and machines can share them.

`penstock evaluate FILE` scores the responses in a Parquet file by data source, with the rewards of a run. The file has
verl's columns and `responses`: a list of samples, or one text.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import print_table, to_json
from penstock.cli.parser import Parser, interruptible, parse_with_overrides, run_interruptible, whole_number
from penstock.errors import ConfigError, InvalidInput, ProcessDied
from penstock.sampling import add_sampling_flags, sampling_from_flags
from penstock_tools.offline.shard import WHOLE, Shard, parse_shard

if TYPE_CHECKING:
    from penstock.config.run import RunConfig
    from penstock.sample_scores import ScoreSummary
    from penstock.trajectory import Prompt


def generate(argv: Sequence[str]) -> int:
    args, overrides = parse_with_overrides(_generate_parser(), argv)
    config = _config(args, overrides)
    prompts = _read(args, config)

    from penstock.logs import setup_logging
    from penstock_tools.offline.answer_store import AnswerStore
    from penstock_tools.offline.answers import answer_missing, describe_settings
    from penstock_tools.offline.servers import answer_in_servers, divide_machine

    setup_logging("generate")
    settings = describe_settings(config, args.file, prompts, scored=args.score)
    open_store = partial(AnswerStore, args.output, settings, args.shard.split(0, args.servers))
    environments = divide_machine(args.servers, config.rollout.engine.tensor_parallel_size) if args.servers > 1 else []
    with interruptible("while it sampled answers; the same command continues"):
        with open_store() as store:
            num_found, tokens_before = len(store.rows), store.totals.num_tokens
            if not environments:
                log = None if args.verbose else store.folder / "logs" / f"engine-{args.shard.index}.log"
                seconds = answer_missing(
                    config, prompts, store, concurrency=args.concurrency, scored=args.score, log=log
                )
                num_tokens, counting = store.written.num_tokens, "not counting the start of the engine"
        if environments:
            started = time.monotonic()
            if not store.rows.issuperset(args.shard.rows(len(prompts))):
                answer_in_servers(argv, environments, args.shard, store.folder, len(prompts))
            seconds = time.monotonic() - started
            with open_store() as store:
                store.finish(prompts)
            num_tokens, counting = store.totals.num_tokens - tokens_before, "with the start of the engines"
    totals = store.totals
    print(
        f"{args.output}: {len(store.rows)} of {len(prompts)} prompts, {totals.num_samples} samples, "
        f"{totals.num_tokens:,} tokens"
        + (f"; {num_found} prompts had been answered before" if num_found else "")
        + f"\nmodel: {config.model.path}"
    )
    if num_tokens:
        print(f"{num_tokens / seconds:,.0f} tokens/s over {seconds:.1f} s, {counting}")
    if totals.num_rewards:
        print(f"mean reward {totals.reward_sum / totals.num_rewards:.4f}")
    if totals.num_failed:
        print(f"{totals.num_failed} prompts have no samples; the column `error` says why")
    if not store.finished:
        _report_missing(args.shard, store.rows, len(prompts))
    return 1 if totals.num_failed == len(prompts) else 0


def _report_missing(shard: Shard, answered: set[int], num_prompts: int) -> None:
    """Print what other shards have not answered yet. Raises ProcessDied if this one, in servers, lacks rows."""
    if num_own := len(set(shard.rows(num_prompts)) - answered):
        raise ProcessDied(f"{num_own} prompts are not answered, because servers ended; the same command continues")
    missing = Counter(row % shard.count for row in range(num_prompts) if row not in answered)
    shards = ", ".join(f"{count} of shard {index}/{shard.count}" for index, count in sorted(missing.items()))
    print(f"prompts that are not answered yet: {shards}; the shard that ends last writes the file")


def _generate_parser() -> Parser:
    parser = Parser(
        prog="penstock generate",
        description="Sample answers to the prompts of a dataset file. Run it again to continue where it was stopped.",
        epilog="Fields of the config may follow as overrides: --rollout.engine.max_model_len 8192",
    )
    parser.add_argument("file", type=Path, help="prompts: verl Parquet, or JSONL with the same fields")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="Parquet file to write")
    parser.add_argument(
        "--config", type=Path, help="YAML file of a run, for its model, engine, agents, rewards and dataset.columns"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER",
        help="Hugging Face folder, such as an exported checkpoint, or Hub id; replaces the config's",
    )  # fmt: skip
    parser.add_argument("--engine", metavar="NAME", help="engine to use (default: vllm where it is installed)")
    parser.add_argument("--n", type=whole_number(1), default=1, help="samples per prompt (default: %(default)s)")
    add_sampling_flags(parser)
    parser.add_argument("--seed", type=int, help="make every sample reproducible, whatever the order of work")
    parser.add_argument(
        "--concurrency", type=whole_number(1), metavar="N",
        help="prompts to answer at once (default: enough to fill the engine)",
    )  # fmt: skip
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="only the first N prompts")
    parser.add_argument("--verbose", action="store_true", help="print the engine's log")
    parser.add_argument("--score", action="store_true", help="score each answer with rollout.reward")
    parser.add_argument(
        "--servers", type=whole_number(1), default=1, metavar="N",
        help="engines on this machine (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shard", type=parse_shard, default=WHOLE, metavar="I/N",
        help="answer part I of N, from 0; others share the output folder",
    )  # fmt: skip
    return parser


def _config(args: argparse.Namespace, overrides: list[str]) -> RunConfig:
    from penstock.config.loading import load_config, load_overrides
    from penstock.hub import with_local_model
    from penstock_tools.starter import context_of

    if args.model is None and args.config is None:
        raise ConfigError("no model is given; add --model FOLDER or --config FILE")
    overrides += ["--model.path", str(args.model)] if args.model is not None else []
    overrides += ["--rollout.engine.name", args.engine] if args.engine is not None else []
    config = with_local_model(load_config(args.config, overrides) if args.config else load_overrides({}, overrides))
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"{config.model.path} is not a model folder; give one with config.json in it")
    if args.config is None and not any(word.startswith("--rollout.engine.max_model_len") for word in overrides):
        longest = min(config.rollout.engine.max_model_len, context_of(str(config.model.path)))
        config = config.changed({"rollout.engine.max_model_len": longest})
    return config


def _read(args: argparse.Namespace, config: RunConfig) -> list[Prompt]:
    from itertools import islice

    from penstock.feed.datasets import read_prompts
    from penstock.hub import data_source_of

    sampling = sampling_from_flags(args)
    dataset = config.dataset.changed({"data_source": data_source_of(config.dataset)})
    rows = read_prompts(args.file, num_samples=args.n, sampling=sampling, config=dataset)
    prompts = list(islice(rows, args.limit))
    if not prompts:
        raise InvalidInput(str(args.file), "contains no prompts; check the file")
    if args.seed is None:
        return prompts
    # Sample i of a prompt uses seed + i, so prompts are args.n seeds apart and no two samples share a seed.
    return [
        replace(prompt, sampling=replace(sampling, seed=(args.seed + row * args.n) % 2**63))
        for row, prompt in enumerate(prompts)
    ]


def evaluate(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock evaluate",
        description="Score the responses in a Parquet file by data source; prints means and pass@k, writes the scores.",
        epilog="Fields of the config may follow as overrides: --rollout.reward.num_processes 16",
    )
    parser.add_argument("file", type=Path, help="Parquet with verl's columns and the responses")
    parser.add_argument("--config", type=Path, help="YAML file of a run, for its rollout.reward and dataset.columns")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="Parquet file to write (default: FILE.scored.parquet)"
    )
    parser.add_argument(
        "--response-column", default="responses", metavar="NAME",
        help="column with the responses (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--pass-score", type=float, default=1.0, metavar="X",
        help="lowest score with which a response passes (default: 1)",
    )  # fmt: skip
    parser.add_argument("--score", default="", metavar="NAME", help="part of the reward that passes, such as acc")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, overrides = parse_with_overrides(parser, argv)

    from penstock.config.loading import load_config, load_overrides
    from penstock_tools.offline.answers import ScoredFile

    model = {"model": {"path": "."}}  # required by the config model, but not used here
    config = load_config(args.config, overrides) if args.config else load_overrides(model, overrides)
    output = args.output or args.file.with_suffix(".scored.parquet")
    scored = ScoredFile(args.file, output, args.response_column, config)
    run_interruptible(scored.write(), "while it scored responses; nothing was written")
    summaries, num_errors = scored.summaries(args.pass_score, args.score), scored.num_errors()
    if args.json:
        sources = {name: asdict(summary) for name, summary in summaries.items()}
        print(to_json({"data_sources": sources, "reward_errors": num_errors, "output": str(output)}))
    else:
        _print_summaries(summaries, num_errors, output)
    return 0


def _print_summaries(summaries: dict[str, ScoreSummary], num_errors: dict[str, int], output: Path) -> None:
    ks = sorted({1}.union(*(summary.pass_at for summary in summaries.values())))
    parts = sorted(set().union(*(summary.parts for summary in summaries.values())))
    rows = [
        (
            name or "(none)", summary.num_prompts, summary.num_samples, summary.mean,
            *map(summary.pass_at.get, ks), *map(summary.parts.get, parts),
        )
        for name, summary in summaries.items()
    ]  # fmt: skip
    print_table(("data source", "prompts", "responses", "mean", *(f"pass@{k}" for k in ks), *parts), rows)
    if num_errors:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(num_errors.items()))
        print(f"{sum(num_errors.values())} rewards failed ({counts}); they got error_value")
    print(f"scores: {output}")
