"""Checks that a process makes before it starts anything, also for `--check`. Each raises ConfigError."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from penstock.config.learner import LearnerConfig
from penstock.config.rewards import FunctionReward, RewardConfig
from penstock.config.run import RunConfig
from penstock.config.service import RedisConfig
from penstock.errors import ConfigError


def check_redis(config: RedisConfig) -> None:
    """Check that a URL is set and that its credentials and certificates can be read. Does not connect."""
    if not config.url:
        raise ConfigError("redis.url is empty; set it to the run's Redis, or use `penstock up`, which starts one")
    from penstock.store.redis_client import connect

    try:
        connect(config)
    except ValueError as error:
        raise ConfigError(f"redis.url: {error}") from error


def check_model(config: RunConfig) -> None:
    _check_model_folder("model.path", config.model.path)


def check_roles(config: LearnerConfig) -> None:
    """Check the model folders of the critic and the reward model."""
    if config.critic is not None and config.critic.path is not None:
        _check_model_folder("learner.critic.path", config.critic.path)
    if config.reward_model is not None:
        _check_model_folder("learner.reward_model.path", config.reward_model.path)


def _check_model_folder(name: str, path: Path) -> None:
    model_file = path / "config.json"
    if not model_file.is_file():
        raise ConfigError(f"{name} {path} is not a model folder; give one with config.json in it{_hub_hint(path)}")
    try:
        json.loads(model_file.read_text())
    except ValueError as error:
        raise ConfigError(f"{model_file} is not JSON: {error}") from error


def _hub_hint(path: Path) -> str:
    """Advice for a Hub name such as Qwen/Qwen2.5-0.5B, which other tools would download."""
    is_hub_name = len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()
    return f"; penstock downloads nothing: run `hf download {path} --local-dir FOLDER` first" if is_hub_name else ""


def check_rewards(config: RewardConfig) -> None:
    """Check that the files of custom reward functions exist."""
    if config.function_file is not None:
        _check_file("rollout.reward.function_file", config.function_file)
    for source, reward in config.by_data_source.items():
        if isinstance(reward, FunctionReward):
            _check_file(f"rollout.reward.by_data_source.{source}.file", reward.file)


def check_datasets(config: RunConfig) -> None:
    files: Iterable[Path | None] = (config.dataset.file, config.dataset.validation.file)
    for file in files:
        if file is not None and not file.exists():
            raise ConfigError(f"dataset {file} does not exist")


def check_run_folder(config: RunConfig) -> None:
    """Check that the run's folder can be created and written to."""
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        probe = config.folder / ".check"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir {config.run_dir} cannot be written to: {error.strerror}; set it to a writable folder"
        ) from error


def _check_file(name: str, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{name} {path} does not exist")
