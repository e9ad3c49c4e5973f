"""`penstock up --check`: what every process of the run would check, without starting it or writing to its folder."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.config.dataset import listed_files
from penstock.config.loading import dump_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded, InvalidInput, PenstockError
from penstock.feed.datasets import RowFormat, matching_files, read_prompts
from penstock.machine import port_is_free
from penstock.start_checks import RUN_CHECKS, check_agent_packages, check_run_folder
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import RewardChoice
from penstock_rollout.tokenization import PromptLength, Tokenization
from penstock_services.gateway.access import check_gateway

CHECK_TIMEOUT_S = 120.0
PRIVATE_REDIS = "redis://127.0.0.1:6379"
"""Stands for the run's own Redis, which a check does not start. Checks do not connect."""


def check_before_start(config: RunConfig) -> None:
    """Make every check that needs no other process. Raises ConfigError or InvalidInput. Takes milliseconds."""
    for check in RUN_CHECKS.values():
        check(config)
    if config.rollout.num_servers:
        check_agent_packages(config.rollout.agents)
    check_run_folder(config)
    check_gateway(config.gateway)
    if config.gateway.keys_file is not None and config.gateway.api_key_file is None:
        raise ConfigError(
            "gateway.keys_file holds hashes only, and `penstock up` itself calls the gateway; set gateway.api_key_file "
            "as well"
        )
    for name in ("port", "grpc_port"):
        port = getattr(config.gateway, name)
        if port and not port_is_free(config.gateway.host, port):
            raise ConfigError(
                f"port {port} on {config.gateway.host} is in use; set gateway.{name} to a free one, or 0 for any"
            )


async def check_processes(config: RunConfig) -> list[str]:
    """Let the learner and a rollout server check the config in separate processes, and look at the dataset meanwhile.
    Returns what servers would warn of. Raises ConfigError with everything that is wrong."""
    if not config.redis.url:
        config = config.changed({"redis.url": PRIVATE_REDIS})
    modules = ["penstock_learner", *["penstock_rollout"] * bool(config.rollout.num_servers)]
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        file = Path(folder) / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(dump_config(config))
        looking = asyncio.create_task(asyncio.to_thread(_look_at_dataset, config))
        failures = await asyncio.gather(*(_failure_of(module, file) for module in modules))
        failure, doubts = await looking
    if found := [each for each in (*failures, failure) if each]:
        raise ConfigError("; ".join(found))
    return doubts


def _look_at_dataset(config: RunConfig) -> tuple[str, list[str]]:
    """What is wrong with the dataset, empty if nothing is, and what servers would warn of."""
    try:
        return "", doubts_about_dataset(config) if config.rollout.num_servers else []
    except PenstockError as error:
        return str(error), []


async def _failure_of(module: str, config_file: Path) -> str:
    """What the check of a module finds wrong; empty if nothing is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--config", str(config_file), "--check",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{module} --check did not end in {CHECK_TIMEOUT_S:.0f} s; try again when this machine is less busy"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    last = (errors.decode(errors="replace").strip().splitlines() or [f"{module} --check exited with an error"])[-1]
    return last.partition(": error: ")[2] or last


# ── what servers would warn of in a dataset: data sources without their own reward, and prompts that are too long ──

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
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would warn of the same prompts, without what to do
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
