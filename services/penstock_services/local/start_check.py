"""`penstock up --check`: what every process of the run would check, without starting it or writing to its folder."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from penstock.config.loading import dump_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded
from penstock.ports import port_is_free
from penstock.start_checks import (
    check_agent_packages,
    check_chat_template,
    check_datasets,
    check_first_rows,
    check_lengths,
    check_model,
    check_rewards,
    check_run_folder,
)
from penstock_services.gateway.start_check import check_gateway

CHECK_TIMEOUT_S = 120.0
PRIVATE_REDIS = "redis://127.0.0.1:6379"
"""Stands for the run's own Redis, which a check does not start. Checks do not connect."""


def check_before_start(config: RunConfig) -> None:
    """Make every check that needs no other process. Raises ConfigError or InvalidInput. Takes milliseconds."""
    check_model(config)
    check_chat_template(config)
    check_rewards(config.rollout.reward)
    if config.rollout.num_servers:
        check_agent_packages(config.rollout.agents)
    check_datasets(config)
    check_first_rows(config)
    check_lengths(config)
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


async def check_processes(config: RunConfig) -> None:
    """Let the learner and a rollout server check the config, in processes of their own. Raises ConfigError."""
    if not config.redis.url:
        config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": PRIVATE_REDIS})})
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        file = Path(folder) / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(dump_config(config))
        modules = ["penstock_learner", *(["penstock_rollout"] if config.rollout.num_servers else [])]
        failures = await asyncio.gather(*(_failure(module, file) for module in modules))
    if found := [failure for failure in failures if failure]:
        raise ConfigError("; ".join(found))


async def _failure(module: str, file: Path) -> str:
    """What `--check` of a process finds. Empty if nothing is wrong."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--config", str(file), "--check",
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
