"""Checks the config of a rollout server before anything is loaded."""

from __future__ import annotations

import asyncio
import shutil

from prometheus_client import CollectorRegistry

from penstock.config.rollout import AgentsConfig, SearchTool
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.internal_calls import ClusterKey, check_certificates
from penstock.machine import is_loopback
from penstock.start_checks import (
    check_agent_packages,
    check_lengths,
    check_model,
    check_redis,
    check_rewards,
    check_run_folder,
    check_tokenizer,
)
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.tool_calls import tokenization_of
from penstock_rollout.engines.factory import (
    check_devices,
    check_serves_model,
    check_settings,
    resolve_engine_name,
)
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer


def check(config: RunConfig) -> str:
    """Raise ConfigError if the config cannot work. Returns the name of the engine, without importing it. Reward
    functions are loaded in a separate process, as the server does, and agents and tools in this one. Nothing is
    written."""
    check_address(config)
    check_redis(config.redis)
    check_model(config)
    check_tokenizer(config)
    check_rewards(config.rollout.reward)
    agents = config.rollout.agents
    for name, tool in agents.tools.items():
        if isinstance(tool, SearchTool) and tool.index is not None and not tool.index.exists():
            raise ConfigError(f"rollout.agents.tools.{name}.index {tool.index} does not exist; check the path")
    check_agent_packages(agents)
    for name, server in agents.mcp_servers.items():
        if server.command and shutil.which(server.command[0]) is None:
            raise ConfigError(f"rollout.agents.mcp_servers.{name}.command: there is no program {server.command[0]}")
    if agents != AgentsConfig():
        Agents.load(agents, config.rollout.engine.max_model_len, tokenization_of(config))
    check_lengths(config)
    check_run_folder(config)
    ClusterKey.of(config).check()
    check_certificates(config.tls)
    engine = resolve_engine_name(config.rollout.engine)
    check_devices(engine, config.rollout.engine)
    check_settings(engine, config.rollout.engine, report_experts=config.learner.router.replay)
    check_serves_model(engine, config.model.path)
    asyncio.run(_check_reward_functions(config))
    return engine


async def _check_reward_functions(config: RunConfig) -> None:
    scorer = Scorer(config.rollout.reward, RolloutMetrics(CollectorRegistry()))
    try:
        await scorer.check()
    finally:
        await scorer.close()


def check_address(config: RunConfig) -> None:
    """Raise ConfigError if the internal port is open to other machines without a cluster key that the operator made. A
    key that this process makes is in its own run folder, where the processes of other machines may not find it."""
    if not is_loopback(config.rollout.host) and config.weights.cluster_key_file is None:
        raise ConfigError(
            f"rollout.host {config.rollout.host} is reachable by others; set weights.cluster_key_file, or use 127.0.0.1"
        )
