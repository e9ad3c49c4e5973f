"""`penstock up --check`: what every process of the run would check, without starting it or writing to its folder."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.config.loading import dump_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded
from penstock.machine import port_is_free
from penstock.start_checks import RUN_CHECKS, check_agent_packages, check_run_folder
from penstock_services.gateway.access import check_gateway

CHECK_TIMEOUT_S = 120.0
DATASET_CHECK = "penstock_tools.local.dataset_check"
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
    """Let the learner and a rollout server check config and dataset, in separate processes. Returns the warnings of a
    server. Raises ConfigError."""
    if not config.redis.url:
        config = config.changed({"redis.url": PRIVATE_REDIS})
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        file = Path(folder) / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(dump_config(config))
        commands = [["penstock_learner", "--config", str(file), "--check"]]
        if config.rollout.num_servers:
            commands.append(["penstock_rollout", "--config", str(file), "--check"])
            commands.append([DATASET_CHECK, "--config", str(file)])
        checked = await asyncio.gather(*map(_checked, commands))
    if found := [failure for failure, _ in checked if failure]:
        raise ConfigError("; ".join(found))
    return checked[-1][1] if commands[-1][0] == DATASET_CHECK else []


async def _checked(command: Sequence[str]) -> tuple[str, list[str]]:
    """What the check of a module finds wrong, empty if nothing is, and the lines that it prints."""
    module = command[0]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{module} --check did not end in {CHECK_TIMEOUT_S:.0f} s; try again when this machine is less busy"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return "", output.decode(errors="replace").splitlines()
    last = (errors.decode(errors="replace").strip().splitlines() or [f"{module} --check exited with an error"])[-1]
    return last.partition(": error: ")[2] or last, []
