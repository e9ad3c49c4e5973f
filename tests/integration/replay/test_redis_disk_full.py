"""A real Redis that cannot write its append-only file: it is named, producers wait, and the learner waits too."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import Unavailable
from penstock.machine import wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from penstock_tools.local.private_redis import find_redis_server
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
    assert wait_for_port("127.0.0.1", server.port, timeout_s=20)
    yield server
    server.kill()


@pytest.mark.fault_row(
    "disks", "no room for Redis' log", how="a limit on the size of Redis' files", must="it is named, and everyone waits"
)
async def test_a_full_disk_is_named_and_waited_for(
    limited_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    config = RedisConfig(url=limited_redis.url)
    client, patient = connect(config), connect(config, patient=True)
    queue, learner = (RedisReplayQueue(each, "full", ReplayConfig()) for each in (client, patient))
    with pytest.raises(Unavailable, match=r"cannot write to its disk; free space .* \(MISCONF") as refused:
        async with asyncio.timeout(60):
            while True:
                await queue.submit([b"p" * 100_000], [0], "")
                await asyncio.sleep(0.02)
    assert "\n" not in str(refused.value)

    with caplog.at_level(logging.WARNING):
        taking = asyncio.create_task(learner.take_term(0))
        async with asyncio.timeout(30):
            while "MISCONF" not in caplog.text:
                await asyncio.sleep(0.02)
            assert limited_redis.process is not None
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(limited_redis.process.pid, resource.RLIMIT_FSIZE, unlimited)
            assert await taking == 1
    await client.aclose()
    await patient.aclose()
