"""`python -m penstock_tools.local.dataset_check --config run.yaml`: what servers would warn of in a dataset.

`penstock up --check` runs it. It prints a line for each data source without its own reward, and for each file with
prompts that are too long. Only the first rows of a file are read, and nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.cli.parser import Parser, parse_with_overrides
from penstock.config.dataset import listed_files
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.feed.datasets import RowFormat, matching_files, read_prompts
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import RewardChoice
from penstock_rollout.tokenization import PromptLength, Tokenization

MAX_ROWS = 1000
"""Rows of a file that are looked at. More would take longer than a check should."""


def doubts_about_dataset(config: RunConfig) -> list[str]:
    """One line for each thing, with what to do. Raises InvalidInput for a row that is not a prompt. The rows of a
    loader are not read."""
    if config.dataset.loader:
        return []
    files = {path: _first_prompts(config, path) for path in _paths(config)}
    if not files:
        return []
    choice = RewardChoice(config.rollout.reward)
    sources = dict.fromkeys(prompt.data_source for prompts in files.values() for prompt in prompts)
    unknown = [choice.unknown_text(source) for source in sources if not choice.is_known(source)]
    return [*unknown, *_long_prompts(config, files)]


def _paths(config: RunConfig) -> Iterator[Path]:
    for files in (config.dataset.file, config.dataset.validation.file):
        for entry in listed_files(files):
            yield from matching_files(entry.file)


def _first_prompts(config: RunConfig, path: Path) -> list[Prompt]:
    row_format = RowFormat(config.dataset.columns, config.dataset.data_source)
    prompts = read_prompts(path, num_samples=1, sampling=Sampling(max_tokens=1), row_format=row_format)
    return list(islice(prompts, MAX_ROWS))


def _long_prompts(config: RunConfig, files: dict[Path, list[Prompt]]) -> Iterator[str]:
    """Tools, which an agent may show to the model before a prompt, are not counted."""
    rollout = config.rollout
    tokenization = Tokenization(config.model.path, template_arguments=rollout.prompt.template_arguments)
    limit = PromptLength(rollout.prompt, rollout.engine.max_model_len, RolloutMetrics(CollectorRegistry())).max_tokens
    treatment = "would be dead-lettered" if rollout.prompt.overlong == "filter" else "would be truncated"
    for path, prompts in files.items():
        lengths, refused = [], []
        for prompt in prompts:
            try:
                lengths.append(len(tokenization.prompt_ids(prompt)))
            except InvalidInput as error:
                refused.append(str(error))
        where = f"of the first {len(prompts)} prompts of {path}"
        if refused:
            yield f"{len(refused)} {where} would be dead-lettered; correct them; the first: {refused[0]}"
        if num_long := sum(length > limit for length in lengths):
            yield (
                f"{num_long} {where} have more than {limit} tokens, up to {max(lengths)}, and {treatment}; shorten "
                "them, or raise rollout.prompt.max_tokens or rollout.engine.max_model_len"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="penstock check-dataset", description="Look for what servers would warn of in a dataset.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    arguments, overrides = parse_with_overrides(parser, argv)
    try:
        for doubt in doubts_about_dataset(load_config(arguments.config, overrides)):
            print(doubt)
    except PenstockError as error:
        print(f"penstock check-dataset: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
