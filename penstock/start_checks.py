"""Checks that a process makes before it starts anything, also for `--check`.

Each check_… raises ConfigError, and leaves nothing behind."""

from __future__ import annotations

import ast
import json
import tempfile
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
    """Check the model folders of the roles that have one of their own."""
    if config.algorithm.kl.placement != "none" and config.reference.path is not None:
        _check_model_folder("learner.reference.path", config.reference.path)
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
    """Check that the files of custom reward functions define them. Does not run the files."""
    if config.function_file is not None:
        _check_function("rollout.reward.function_file", config.function_file, config.function_name)
    for source, reward in config.by_data_source.items():
        if isinstance(reward, FunctionReward):
            _check_function(f"rollout.reward.by_data_source.{source}.file", reward.file, reward.name)
    if isinstance(config.default, FunctionReward):
        _check_function("rollout.reward.default.file", config.default.file, config.default.name)


def _check_function(field: str, file: Path, name: str) -> None:
    if not file.is_file():
        raise ConfigError(f"{field} {file} does not exist")
    try:
        module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field} {file} is not Python: {error}") from error
    names = _top_level_names(module)
    if name not in names and "*" not in names:
        raise ConfigError(f"{field} {file} does not define {name}; add the function, or give its name in the config")


def _top_level_names(module: ast.Module) -> set[str]:
    """The names that a module binds, in branches and `try` blocks too. `*` stands for an import of all names."""
    names = set()
    waiting: list[ast.AST] = [*module.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return names


def check_lengths(config: RunConfig) -> None:
    """Check that a prompt and a whole response fit into the engine's context."""
    longest = config.rollout.engine.max_model_len
    dataset, validation = config.dataset, config.dataset.validation
    limits = {"dataset.max_tokens": dataset.max_tokens if dataset.file is not None else 0}
    limits["dataset.validation.max_tokens"] = validation.max_tokens if validation.file is not None else 0
    for name, max_tokens in limits.items():
        if max_tokens >= longest:
            raise ConfigError(
                f"{name} is {max_tokens}, which leaves no room for a prompt in rollout.engine.max_model_len {longest}; "
                "lower the one or raise the other"
            )


def doubts_about(config: RunConfig) -> list[str]:
    """What works but is probably not meant: one line each, with what to do."""
    doubts = []
    if config.dataset.file is not None and config.dataset.top_p < 1:
        doubts.append(
            f"dataset.top_p is {config.dataset.top_p:g}: engines and learner then disagree on log-probs; train with 1"
        )
    return doubts


def check_datasets(config: RunConfig) -> None:
    files: Iterable[Path | None] = (config.dataset.file, config.dataset.validation.file)
    for file in files:
        if file is not None and not file.exists():
            raise ConfigError(f"dataset {file} does not exist")


def check_run_folder(config: RunConfig) -> None:
    """Check that the run's folder can be created and written to. Leaves nothing behind."""
    existing = next(folder for folder in (config.folder, *config.folder.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".check-"):
            pass
    except OSError as error:
        raise _unwritable(config, error) from error


def make_run_folder(config: RunConfig) -> None:
    """Create the run's folder if it is missing. Raises ConfigError if it cannot be written to."""
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        probe = config.folder / ".check"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(config, error) from error


def _unwritable(config: RunConfig, error: OSError) -> ConfigError:
    return ConfigError(f"run_dir {config.run_dir} cannot be written to: {error.strerror}; set it to a writable folder")
