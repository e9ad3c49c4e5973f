"""`penstock evaluate FILE` scores the responses in a Parquet file by data source, with the rewards of a run.

It needs neither Redis nor an engine. The file has verl's columns and `responses`: a list of samples, or one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import print_table, to_json
from penstock.cli.parser import Parser, interruptible, parse_with_overrides

if TYPE_CHECKING:
    from penstock.sample_scores import ScoreSummary


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock evaluate",
        description="Score the responses in a Parquet file by data source; prints means and pass@k, writes the scores.",
        epilog="Fields of the config may follow as overrides: --rollout.reward.num_processes 16",
    )
    parser.add_argument("file", type=Path, help="Parquet with verl's columns and the responses")
    parser.add_argument("--config", type=Path, help="YAML file of a run, for its rollout.reward")
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, overrides = parse_with_overrides(parser, argv)

    import asyncio

    from penstock.config.loading import load_config, load_overrides
    from penstock_tools.offline.scoring_run import ScoringRun

    model = {"model": {"path": "."}}  # required by the config model, but not used here
    config = load_config(args.config, overrides) if args.config else load_overrides(model, overrides)
    output = args.output or args.file.with_suffix(".scored.parquet")
    run = ScoringRun(args.file, output, args.response_column, config.rollout.reward)
    with interruptible("while it scored responses; nothing was written"):
        asyncio.run(run.run())
    summaries, num_errors = run.summaries(args.pass_score), run.num_errors()
    if args.json:
        sources = {name: asdict(summary) for name, summary in summaries.items()}
        print(to_json({"data_sources": sources, "reward_errors": num_errors, "output": str(output)}))
    else:
        _print(summaries, num_errors, output)
    return 0


def _print(summaries: dict[str, ScoreSummary], num_errors: dict[str, int], output: Path) -> None:
    ks = sorted({1}.union(*(summary.pass_at for summary in summaries.values())))
    rows = [
        (name or "(none)", summary.num_prompts, summary.num_samples, summary.mean, *map(summary.pass_at.get, ks))
        for name, summary in summaries.items()
    ]
    print_table(("data source", "prompts", "responses", "mean", *(f"pass@{k}" for k in ks)), rows)
    if num_errors:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(num_errors.items()))
        print(f"{sum(num_errors.values())} rewards failed ({counts}); they got error_value")
    print(f"scores: {output}")
