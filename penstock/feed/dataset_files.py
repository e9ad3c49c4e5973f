"""Reads all files of a dataset: paths, patterns and weights, or the rows of a loader of the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.config.dataset import DatasetConfig, Files, listed_files
from penstock.errors import InvalidInput
from penstock.feed.datasets import RowFormat, make_prompt, read_prompts
from penstock.feed.files import matching_files
from penstock.trajectory import Prompt, Sampling
from penstock.user_code import load_callable


def read_files(
    files: Files, config: DatasetConfig, num_samples: int, sampling: Sampling
) -> list[tuple[float, list[Prompt]]]:
    """The weight and the prompts of each entry. The prompts of a pattern are in the order of its files' names.

    With `dataset.loader`, the files go to the loader, and its rows have the weight 1."""
    row_format = RowFormat(config.columns, config.data_source)
    if config.loader:
        rows = _loaded(files, config)
        return [(1.0, [make_prompt(where, row, num_samples, sampling, row_format) for where, row in rows])]
    return [
        (
            entry.weight,
            [
                prompt
                for path in matching_files(entry.file)
                for prompt in read_prompts(path, num_samples=num_samples, sampling=sampling, row_format=row_format)
            ],
        )
        for entry in listed_files(files)
    ]


def shown_files(files: Files) -> str:
    """The files of a dataset, for messages."""
    return ", ".join(str(entry.file) for entry in listed_files(files))


def _loaded(files: Files, config: DatasetConfig) -> Iterable[tuple[str, Any]]:
    """The rows of the user's loader, each with its place."""
    loader = load_callable(config.loader, "dataset.loader")
    paths = [str(path) for entry in listed_files(files) for path in matching_files(entry.file)]
    try:
        for number, row in enumerate(loader(files=paths, **config.loader_kwargs)):
            yield f"{config.loader} row {number}", row
    except InvalidInput:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInput("dataset.loader", f"{config.loader} failed: {why}") from error
