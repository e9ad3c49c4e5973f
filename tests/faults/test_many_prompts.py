"""Row of the fault matrix: a backlog of a million prompts."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.client import PenstockClient
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from support.gateways import Gateway, run_config, running
from support.redis_server import RedisProcess

FEW, MANY, BATCH, CLIENTS = 2_000, 1_000_000, 500, 8
BODY = json.dumps({"prompts": [{"token_ids": [1, 2, 3]}] * BATCH}).encode()
JSON = {"Content-Type": "application/json"}
MAX_BYTES = 600
"""Memory of Redis for each prompt that waits."""
MAX_SLOWER = 5.0
"""How much longer a lease may take with a million prompts that wait than with two thousand."""


@pytest.mark.fault_row(
    "queue", "a million tiny prompts wait", how="REST submits them in batches; then Redis is killed and started again",
    must="each is stored once; a lease does not take longer; pages and cancels work; the restart brings all back",
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_million_tiny_prompts_wait(tmp_path: Path, record_property: Any) -> None:
    server = RedisProcess(tmp_path)
    server.start()
    config = run_config(server.url, tmp_path)
    redis = connect(RedisConfig(url=server.url, retry_s=120), patient=True)
    queue = RedisReplayQueue(redis, config.run, config.replay)
    try:
        async with running(config) as gateway, PenstockClient(gateway.url, api_key=gateway.key) as client:
            await submit(gateway, FEW)
            few_s = await lease_s(queue)
            empty = int((await redis.info("memory"))["used_memory"])
            await submit(gateway, MANY - FEW)
            assert (await redis.info("memory"))["used_memory"] - empty < MAX_BYTES * (MANY - FEW)
            many_s = await lease_s(queue)
            print(f"a lease takes {1e3 * few_s:.2f} ms with {FEW} prompts and {1e3 * many_s:.2f} ms with {MANY}")
            assert many_s < MAX_SLOWER * few_s
            assert [prompt.prompt_id for prompt in (await client.prompts(page_size=3)).prompts] == [1, 2, 3]
            assert (await client.get_prompt(MANY)).state == "PENDING"
            assert [prompt.state for prompt in await client.cancel([MANY])] == ["CANCELLED"]

            killed_s = time.monotonic()
            server.kill()
            server.start()
            async with asyncio.timeout(300):
                stat = await queue.stat()
            recovery_s = time.monotonic() - killed_s
            assert (stat.pending_prompts, stat.conservation_error) == (MANY - 1, 0)
            assert len(await queue.lease("server", 8)) == 8
    finally:
        await redis.aclose()
        server.kill()
    record_property("fault", {"lost": 0, "doubled": 0, "recovery_s": recovery_s})


async def submit(gateway: Gateway, num_prompts: int) -> None:
    """Submit prompts in batches, several at once. Each batch gets ids that no other has."""
    batches = iter(range(0, num_prompts, BATCH))
    ids = set[int]()

    async def submit_some() -> None:
        for _ in batches:
            answer = await gateway.rest.post("/v1/runs/test/prompts", content=BODY, headers=JSON)
            ids.update(map(int, answer.raise_for_status().json()["prompt_ids"]))

    await asyncio.gather(*(submit_some() for _ in range(CLIENTS)))
    assert len(ids) == num_prompts


async def lease_s(queue: RedisReplayQueue) -> float:
    """Seconds that it takes to lease eight prompts: the shortest of 50 times."""
    taken = []
    for _ in range(50):
        started = time.monotonic()
        leases = await queue.lease("server", 8)
        taken.append(time.monotonic() - started)
        for lease in leases:
            await queue.give_back("server", lease)
    return min(taken)
