"""Checks the config of a rollout server before anything is loaded."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.ports import is_loopback
from penstock.start_checks import check_model, check_redis, check_rewards, check_run_folder
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.engines.factory import resolve_engine_name


def check(config: RunConfig) -> str:
    """Raise ConfigError if the config cannot work. Returns the name of the engine, without importing it."""
    check_address(config)
    check_redis(config.redis)
    check_model(config)
    check_rewards(config.rollout.reward)
    agents = config.rollout.agents
    for name, file in (("tools_file", agents.tools_file), ("interactions_file", agents.interactions_file)):
        if file is not None and not file.is_file():
            raise ConfigError(f"rollout.agents.{name} {file} does not exist; check the path")
    check_run_folder(config)
    ClusterKey.of(config).make_if_missing()
    return resolve_engine_name(config.rollout.engine)


def check_address(config: RunConfig) -> None:
    """Raise ConfigError if the internal port is open to other machines without a cluster key that the operator made.

    A key that this process makes is in its own run folder, where the processes of other machines may not find it."""
    if not is_loopback(config.rollout.host) and config.weights.cluster_key_file is None:
        raise ConfigError(
            f"rollout.host {config.rollout.host} is reachable by others; set weights.cluster_key_file, or use 127.0.0.1"
        )
