"""A gateway with four rollout servers, whose engines answer without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio as redis

if TYPE_CHECKING:
    from gateways import Gateway
    from talking_engine import TalkingEngine

NUM_SERVERS = 4


@pytest.fixture
async def talking(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, dict[str, TalkingEngine]]]:
    from gateways import run_config, running
    from penstock.config.service import SessionLimits
    from penstock.config.weights import WeightsConfig
    from scripted_engine import make_tokenizer_folder
    from talking_engine import TalkingEngine, serving

    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text("secret")
    config = run_config(redis_process.url, tmp_path, sessions=SessionLimits(task_lease_s=30)).model_copy(
        update={"weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key")}
    )
    engines = {f"r{number}": TalkingEngine() for number in range(NUM_SERVERS)}
    async with serving(config, redis_client, tmp_path, engines, heartbeats=True), running(config) as gateway:
        yield gateway, engines
