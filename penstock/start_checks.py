"""Checks that a process makes before it starts anything, also for `--check`.

Each check_… raises ConfigError unless it says otherwise, and leaves nothing behind."""

from __future__ import annotations

import ast
import importlib.util
import json
import symtable
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.config.algorithms import GROUP_ADVANTAGES
from penstock.config.dataset import listed_files
from penstock.config.learner import LearnerConfig
from penstock.config.rollout import AgentsConfig, FunctionReward, RewardConfig, SearchTool
from penstock.config.run import RunConfig
from penstock.config.service import RedisConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.hub import is_hub_id, is_model_id
from penstock.machine import idle_gpus
from penstock.trajectory import Sampling

TOKENIZERS = ("tokenizer*", "*.model", "*vocab*", "*.tiktoken", "tekken.json")
"""Files of which a model folder has at least one."""
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Where a model folder may have its template, besides `tokenizer_config.json`."""


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


def check_tokenizer(config: RunConfig) -> None:
    """Check that the model folder has a tokenizer, and its chat template, which every row of a dataset needs."""
    dataset, folder = config.dataset, config.model.path
    if dataset.file is None and dataset.validation.file is None:
        return
    # Without any of these, transformers makes a tokenizer that knows no word.
    if not any(file for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise ConfigError(
            f"model.path {folder} has no tokenizer; copy the model's tokenizer.json and tokenizer_config.json into it"
        )
    if dataset.loader:
        return
    if any((folder / name).exists() for name in CHAT_TEMPLATES):
        return
    try:
        described = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return  # the tokenizer's own error is clearer
    if not described.get("chat_template"):
        raise ConfigError(
            f"model.path {folder} has no chat template, which the prompts of a dataset need; put one into "
            f"{folder / CHAT_TEMPLATES[0]}"
        )


def check_roles(config: LearnerConfig) -> None:
    """Check the model folders of the roles that have their own."""
    for name, role in config.needed_roles.items():
        if path := getattr(role, "path", None):
            _check_model_folder(f"learner.{'roles.' * (name in config.roles)}{name}.path", path)


def _check_model_folder(name: str, path: Path) -> None:
    model_file = path / "config.json"
    if not model_file.is_file():
        raise ConfigError(f"{name} {path} is not a model folder; give one with config.json in it")
    try:
        json.loads(model_file.read_text())
    except ValueError as error:
        raise ConfigError(f"{model_file} is not JSON: {error}") from error


def check_rewards(config: RewardConfig) -> None:
    """Check that the files of custom reward functions define them. Does not run the files."""
    if config.function_file is not None:
        _check_function("rollout.reward.function_file", config.function_file, config.function_name)
    rewards = {f"by_data_source.{source}": reward for source, reward in config.by_data_source.items()}
    for name, reward in (rewards | {"default": config.default}).items():
        if isinstance(reward, FunctionReward):
            _check_function(f"rollout.reward.{name}.file", reward.file, reward.name)


def check_agent_packages(config: AgentsConfig) -> None:
    """Check that the packages of the built-in tools and of MCP servers are installed. Does not import them."""
    for name, tool in config.tools.items():
        if isinstance(tool, SearchTool) and tool.index is not None:
            check_package("bm25s", f"rollout.agents.tools.{name}")
    for name in config.mcp_servers:
        check_package("mcp", f"rollout.agents.mcp_servers.{name}")


def check_package(package: str, place: str) -> None:
    """Check that a package of the extra `[agents]`, which `place` needs, is installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{place} needs the package {package}; install it with: pip install 'penstock[agents]'")


def _check_function(field: str, file: Path, name: str) -> None:
    if not file.is_file():
        raise ConfigError(f"{field} {file} does not exist")
    try:
        source = importlib.util.decode_source(file.read_bytes())
        bound = symtable.symtable(source, str(file), "exec").get_symbols()
        names = {symbol.get_name() for symbol in bound if symbol.is_assigned() or symbol.is_imported()}
        takes_all = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field} {file} is not Python: {error}") from error
    if name not in names and not takes_all:
        raise ConfigError(f"{field} {file} does not define {name}; add the function, or give its name in the config")


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
    doubts = [idle] if (idle := idle_gpus()) else []
    advantage = config.learner.algorithm.advantage.name
    if config.dataset.file is not None and config.dataset.num_samples == 1 and advantage in GROUP_ADVANTAGES:
        doubts.append(
            f"dataset.num_samples is 1, so {advantage} has nothing to compare a response with, and its reward is the "
            "advantage; raise it, for example to 8"
        )
    for name, neutral in Sampling().distribution.items():
        value = neutral if name == "temperature" else getattr(config.dataset, name)
        if config.dataset.file is not None and value != neutral:
            doubts.append(
                f"dataset.{name} is {value:g}: engines and learner then disagree on log-probs; train with {neutral:g}"
            )
    return doubts


def check_datasets(config: RunConfig) -> None:
    """Check that the files are there, and that the files of loader and sampler define them. Runs neither."""
    from penstock.feed.datasets import matching_files

    dataset = config.dataset
    for files in (dataset.file, dataset.validation.file):
        for entry in listed_files(files):
            matching_files(entry.file)
    for field, named in (("loader", dataset.loader), ("sampler", dataset.sampler)):
        file, colon, name = named.rpartition(":")
        if colon and file.endswith(".py"):
            _check_function(f"dataset.{field}", Path(file), name)


def check_first_rows(config: RunConfig) -> None:
    """Check that there are rows, and that each file's first is a prompt. Raises InvalidInput. Skips a loader's."""
    from penstock.feed.datasets import first_prompts, matching_files

    if config.dataset.loader:
        return
    for files in (config.dataset.file, config.dataset.validation.file):
        for entry in listed_files(files):
            found = [first_prompts(path, config.dataset, 1) for path in matching_files(entry.file)]
            if not any(found):
                raise InvalidInput(str(entry.file), "has no rows; write some, or name another file")


RUN_CHECKS: dict[str, Callable[[RunConfig], None]] = {
    "model": check_model,
    "tokenizer": check_tokenizer,
    "rewards": lambda config: check_rewards(config.rollout.reward),
    "dataset": check_datasets,
    "rows": check_first_rows,
    "lengths": check_lengths,
}
"""What a run needs of its config and files, by name, in the order in which it is checked."""


def checks_of_hub_files(config: RunConfig) -> set[str]:
    """The names of RUN_CHECKS that look at files which the config names by their Hub ids, and a start fetches first."""
    files = [*listed_files(config.dataset.file), *listed_files(config.dataset.validation.file)]
    found = {"model", "tokenizer"} if is_model_id(config.model.path) else set()
    return found | ({"dataset", "rows"} if any(is_hub_id(entry.file) for entry in files) else set())


def check_run_folder(config: RunConfig, *, make: bool = False) -> None:
    """Check that files can be written to the run's folder, or to the parent that it will be created in. With `make`, it
    is created. Leaves nothing else behind."""
    try:
        if make:
            config.folder.mkdir(parents=True, exist_ok=True)
        existing = next(folder for folder in (config.folder, *config.folder.absolute().parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=existing, prefix=".check-"):  # processes start at the same time
            pass
    except OSError as error:
        text = f"run_dir {config.run_dir} cannot be written to: {error.strerror}; set it to a writable folder"
        raise ConfigError(text) from error


make_run_folder = partial(check_run_folder, make=True)
