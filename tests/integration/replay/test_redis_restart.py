"""A learner waits for a Redis that restarts, as long as `redis.retry_s` allows."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.cancellation import end_task
from penstock.codec import encode_group
from penstock.config.learner import LearnerConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import PenstockError, Unavailable
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.results import PromptBook
from penstock.store.redis_client import RedisClient, call_patiently, connect
from penstock_learner.loop.batches import BatchReader
from penstock_learner.term import Term
from support.groups import make_group
from support.redis_server import RedisProcess
from support.replay_backends import lease_again

REPLAY = ReplayConfig(groups_per_step=2)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def client(server: RedisProcess) -> AsyncIterator[RedisClient]:
    client = connect(RedisConfig(url=server.url, retry_s=100), patient=True)
    yield client
    await client.aclose()


async def test_a_waiting_learner_outlives_a_restart(
    server: RedisProcess, client: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    queue = RedisReplayQueue(client, "restart", REPLAY)
    await queue.submit([b"p"] * 2, [0, 0], "")
    first, second = await queue.lease("s", 2)
    await queue.take_term(0)
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=60), Term())
    reading = asyncio.create_task(reader.read(1, 0))
    try:
        await queue.append(first, encode_group(make_group(first.prompt_id)), 0)
        server.kill()
        with caplog.at_level(logging.WARNING, logger="penstock.store.redis_client"):
            async with asyncio.timeout(100):
                while "Redis does not answer" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert not reading.done()
        server.start()
        await queue.append(second, encode_group(make_group(second.prompt_id)), 0)
        batch = await asyncio.wait_for(reading, 100)
    finally:
        await end_task(reading)
    assert batch.prompt_ids == [first.prompt_id, second.prompt_id]
    assert await queue.commit(1, batch.prompt_ids) == 2
    assert (await queue.stat()).conservation_error == 0


async def test_patience_ends_and_is_not_for_everyone(server: RedisProcess) -> None:
    server.kill()
    for patient, retry_s in ((True, 0.5), (False, 60)):
        client = connect(RedisConfig(url=server.url, retry_s=retry_s), patient=patient)
        queue = RedisReplayQueue(client, "restart", REPLAY)
        async with asyncio.timeout(100):
            with pytest.raises(Unavailable, match="does not answer"):
                await queue.stat()
            with pytest.raises(Unavailable, match="does not answer"):
                await queue.get_group(1)
        await client.aclose()


async def test_a_call_that_fails_after_its_patience_is_repeated() -> None:
    """As in a process that was suspended while it waited for the answer."""
    failures = iter([RedisTimeoutError("Timeout reading")])

    async def call() -> str:
        for failure in failures:
            await asyncio.sleep(0.3)
            raise failure
        return "answer"

    assert await call_patiently(call, retry_s=0.2) == "answer"


KILLED_BEFORE_THE_SCRIPT_IS_SENT = """
import asyncio, os, signal, sys
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.group_payloads import GroupPayloads
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.results import PromptBook
from penstock.replay.queue_types import Lease
from penstock.store.redis_client import connect
transaction = GroupPayloads._transaction

def killed(payloads, groups, limits, call):
    if call[0] == "EVAL":
        os.kill(os.getpid(), signal.SIGKILL)
    return transaction(payloads, groups, limits, call)

GroupPayloads._transaction = killed
queue = RedisReplayQueue(connect(RedisConfig(url=sys.argv[1])), "restart", ReplayConfig())
asyncio.run(queue.append(Lease(int(sys.argv[2]), 1, b""), b"group", 0))
"""


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("end", ["expires", "cancelled", "accepted"])
@pytest.mark.parametrize("fault", ["killed", "script fails"])
async def test_payloads_that_no_group_names_end_with_their_lease(
    server: RedisProcess, client: RedisClient, fault: str, end: str, is_late: bool
) -> None:
    queue = RedisReplayQueue(client, "restart", REPLAY.model_copy(update={"lease_ttl_s": 0.2, "loss_window_s": 0}))
    await queue.submit([b"p"], [0], "")
    [lease] = await queue.lease("s", 1)
    newest = await lease_again(queue, "t") if is_late else lease
    if fault == "killed":  # Redis does not know append.lua yet, as after a restart
        words = [sys.executable, "-c", KILLED_BEFORE_THE_SCRIPT_IS_SENT, server.url, str(lease.prompt_id)]
        process = await asyncio.create_subprocess_exec(*words)
        assert await process.wait() == -signal.SIGKILL
    else:
        await client.set(queue.keys.meta, "not a hash")
        with pytest.raises(PenstockError, match="WRONGTYPE"):
            await queue.append(lease, b"group", 0)
        await client.delete(queue.keys.meta)
    payloads = queue.keys.group("*")
    assert await client.keys(payloads) == [queue.keys.group(lease.prompt_id, lease.attempt).encode()]
    if end == "cancelled":
        await PromptBook(client, "restart").cancel([lease.prompt_id])
    elif end == "accepted":
        assert await queue.append(newest, b"group", 0) == "accepted"
    else:
        await lease_again(queue, "t")
    named = [queue.keys.group(lease.prompt_id, newest.attempt).encode()] if end == "accepted" else []
    assert await client.keys(payloads) == named
    assert (await queue.stat()).conservation_error == 0
