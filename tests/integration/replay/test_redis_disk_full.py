"""A real Redis that cannot write its append-only file: it is named, producers wait, and the learner waits too."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import NotFound, Unavailable
from penstock.machine import wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock_tools.local.private_redis import find_redis_server
from support.faults.small_disk import fill, small_disk
from support.gateways import assert_problem, post_prompts, run_config, running
from support.redis_server import RedisProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux changes the limits of a running process")
LIMIT_BLOCKS = 2048


@pytest.fixture
def limited_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """Redis may write files of up to LIMIT_BLOCKS of 512 or 1,024 bytes. That has the effect of a full disk, without
    root."""
    server = RedisProcess(tmp_path)

    limited = f'trap "" XFSZ; ulimit -S -f {LIMIT_BLOCKS}; exec "$0" "$1"'
    command = ["sh", "-c", limited, find_redis_server(), str(server.config)]
    server.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for_port("127.0.0.1", server.port, timeout_s=100)
    yield server
    server.kill()


@pytest.mark.fault_row(
    "disks", "no room for Redis' log", how="a limit on the size of Redis' files", must="it is named, and everyone waits"
)
async def test_a_full_disk_is_named_and_waited_for(
    limited_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    config = RedisConfig(url=limited_redis.url, retry_s=200)
    client, patient = connect(config), connect(config, patient=True)
    queue, learner = (RedisReplayQueue(each, "full", ReplayConfig()) for each in (client, patient))
    with pytest.raises(Unavailable, match=r"cannot write to its disk; free space .* \(MISCONF") as refused:
        async with asyncio.timeout(100):
            while True:
                await queue.submit([b"p" * 100_000], [0], "")
                await asyncio.sleep(0.02)
    assert "\n" not in str(refused.value)

    with caplog.at_level(logging.WARNING):
        taking = asyncio.create_task(learner.take_term(0))
        async with asyncio.timeout(100):
            while "MISCONF" not in caplog.text:
                await asyncio.sleep(0.02)
            assert limited_redis.process is not None
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(limited_redis.process.pid, resource.RLIMIT_FSIZE, unlimited)
            assert await taking == 1
    await client.aclose()
    await patient.aclose()


@pytest.mark.fault_row(
    "disks", "no room for Redis' log, {ending}",
    how="the disk of Redis, a tmpfs, is filled while a client submits; then SIGKILL to Redis",
    must="the client gets 503 with the reason; it goes on by itself once there is room; prompts that were accepted "
    "survive, except the last exchange before the first 503 if Redis is killed while the disk is full",
)  # fmt: skip
@pytest.mark.parametrize("ending", ["killed after there was room", "killed while it is full"])
async def test_accepted_prompts_survive_a_full_disk(tmp_path: Path, ending: str, record_property: Any) -> None:
    with small_disk(tmp_path / "disk", 8 * 2**20) as folder:
        server = RedisProcess(folder)
        server.start()
        try:
            lost = await _submit_to_a_full_disk(server, folder, tmp_path, is_killed_full="while" in ending)
        finally:
            server.kill()
    record_property("fault", {"lost": lost, "doubled": 0})


async def _set_fsync(server: RedisProcess, policy: str) -> None:
    """Change when Redis syncs its log, and wait for a sync under way. Redis may postpone its writes for 2 s while there
    is one, and does not see meanwhile that the disk is full."""
    client = connect(RedisConfig(url=server.url))
    async with asyncio.timeout(100):
        await client.config_set("appendfsync", policy)
        while (await client.info("persistence"))["aof_pending_bio_fsync"]:
            await asyncio.sleep(0.01)
    await client.aclose()


async def _submit_to_a_full_disk(server: RedisProcess, folder: Path, run_dir: Path, *, is_killed_full: bool) -> int:
    """Returns the number of accepted prompts that are lost."""
    accepted: list[int] = []
    prompt = {"token_ids": list(range(2000))}
    async with running(run_config(server.url, run_dir)) as gateway:

        async def submit_until(status: int) -> httpx.Response:
            async with asyncio.timeout(100):
                while True:
                    response = await post_prompts(gateway, prompt)
                    accepted.extend(response.json()["prompt_ids"] if response.status_code == 200 else [])
                    if response.status_code == status:
                        return response
                    await asyncio.sleep(0.02)

        for _ in range(5):
            await submit_until(200)
        await _set_fsync(server, "always")
        await submit_until(200)
        await _set_fsync(server, "everysec")
        filler = fill(folder)
        refused = await submit_until(503)
        detail = assert_problem(refused, 503, "UNAVAILABLE")
        assert "cannot write to its disk; free space" in detail and "MISCONF" in detail
        assert (await gateway.rest.get("/v1/runs/test/prompts/1")).json()["state"] == "PENDING", "reads go on"
        if is_killed_full:
            server.kill()
        filler.unlink()
        if not is_killed_full:
            await submit_until(200)
            server.kill()
        server.start()
        await submit_until(200)

    client = connect(RedisConfig(url=server.url))
    queue, missing = RedisReplayQueue(client, "test", ReplayConfig()), []
    for prompt_id in accepted[:-1] if is_killed_full else accepted:  # the last one may have the id of one that is lost
        try:
            await queue.get_prompt(prompt_id)
        except NotFound:
            missing.append(prompt_id)
    await client.aclose()
    # Redis answers before it knows that it could not write. Until there is room, it has that exchange in memory alone.
    assert missing in ([], accepted[-2:-1] if is_killed_full else []), (missing, accepted)
    return len(missing)
