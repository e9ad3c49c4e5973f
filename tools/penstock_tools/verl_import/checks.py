"""Checks of an imported run, as far as its files are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.config.dataset import listed_files
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.hub import is_hub_id
from penstock.start_checks import check_first_rows, check_lengths, check_model, check_rewards


def findings_of(config: RunConfig) -> list[str]:
    """What `penstock up --check` would say about files and lengths: one line each. Nothing is looked up on the Hub."""
    absent = [f"{field}: {path} is not on this machine" for field, path in _paths(config) if not _is_here(path)]
    fields = {line.partition(":")[0] for line in absent}
    checks: list[Callable[[], None]] = [lambda: check_lengths(config)]
    if "model.path" not in fields and config.model.path.exists():
        checks.append(lambda: check_model(config))
    if "rollout.reward.function_file" not in fields:
        checks.append(lambda: check_rewards(config.rollout.reward))
    data = [path for field, path in _paths(config) if field.startswith("dataset.")]
    if all(path.exists() for path in data):
        checks.append(lambda: check_first_rows(config))
    return absent + [message for check in checks if (message := _message(check))]


def _message(check: Callable[[], None]) -> str:
    try:
        check()
    except (ConfigError, InvalidInput) as error:
        return str(error)
    return ""


def _paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    yield "model.path", config.model.path
    dataset, agents = config.dataset, config.rollout.agents
    for entry in listed_files(dataset.file):
        yield "dataset.file", entry.file
    for entry in listed_files(dataset.validation.file):
        yield "dataset.validation.file", entry.file
    for field, path in (
        ("rollout.reward.function_file", config.rollout.reward.function_file),
        ("rollout.agents.tools_file", agents.tools_file),
        ("rollout.agents.interactions_file", agents.interactions_file),
    ):
        if path is not None:
            yield field, path


def _is_here(path: Path) -> bool:
    """A pattern of files counts as here: what it matches is checked at the start of the run."""
    return path.exists() or is_hub_id(path) or "*" in path.name
