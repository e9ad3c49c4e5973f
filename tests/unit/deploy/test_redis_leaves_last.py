"""Redis is stopped after the processes that are stopping, whatever is deleted first."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from penstock.config.service import RedisConfig
from penstock.store.heartbeats import Leaving
from penstock.store.redis_client import connect
from penstock_tools.local.private_redis import find_redis_server
from support.redis_server import SCRIPTS, redis_with_users


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Redis with the users of the chart. Each password is its role's name."""
    passwords = {role: role for role in ("gateway", "rollout", "learner")}
    with redis_with_users(tmp_path_factory.mktemp("leaving"), passwords) as port:
        yield port


@pytest.fixture
async def client(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> AsyncIterator[Redis]:
    role = getattr(request, "param", "learner")
    password = tmp_path / "password"
    password.write_text(role)
    config = RedisConfig(url=f"redis://localhost:{port}/0", username=role, password_file=password)
    client = connect(config)
    yield client
    await client.aclose()


async def start_waiting(port: int, limit_s: int = 60, **settings: str) -> asyncio.subprocess.Process:
    """The chart's preStop hook. It needs redis-cli, which is beside the server."""
    server = Path(find_redis_server())
    folders = f"{settings.pop('programs', server.parent)}:{server.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": folders, "SETTLE_S": "0"} | settings
    script = SCRIPTS / "wait-for-clients.sh"
    return await asyncio.create_subprocess_exec(
        "sh", str(script), "r1", str(limit_s), "-p", str(port), env=environment, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("client", ["gateway", "rollout", "learner"], indirect=True)
async def test_every_role_says_that_it_is_stopping_and_that_it_has_stopped(client: Redis) -> None:
    key, stopping = "penstock:{r1}:leaving", asyncio.Event()
    async with asyncio.timeout(60):
        async with Leaving(client, "r1", "part").holding(stopping):
            assert not await client.zcard(key)
            stopping.set()
            while not await client.zcard(key):
                await asyncio.sleep(0.01)
        assert not await client.zcard(key)


async def test_redis_waits_for_a_process_that_is_stopping(client: Redis, port: int) -> None:
    stopping, done = asyncio.Event(), asyncio.Event()

    async def stop_slowly() -> None:
        async with Leaving(client, "r1", "part").holding(stopping):
            await done.wait()

    async with asyncio.timeout(120):
        task = asyncio.create_task(stop_slowly())
        assert await (await start_waiting(port)).wait() == 0, "nobody is stopping: Redis is evicted alone"
        stopping.set()
        while not await client.zcard("penstock:{r1}:leaving"):
            await asyncio.sleep(0.01)
        waiting = await start_waiting(port)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting.wait()), 1.5)
        done.set()
        await task
        assert await waiting.wait() == 0


async def test_redis_waits_for_processes_that_are_told_later_and_not_forever(
    client: Redis, port: int, tmp_path: Path
) -> None:
    """Kubernetes' garbage collector stops the pods some time after their owners were deleted. The hook's `sleep` lasts
    until they have been."""
    stopping, asked, told = asyncio.Event(), tmp_path / "asked", tmp_path / "told"
    sleep = tmp_path / "sleep"
    sleep.write_text(f"#!/bin/sh\ntouch {asked}\nuntil [ -e {told} ]; do /bin/sleep 0.02; done\n")
    sleep.chmod(0o755)
    async with asyncio.timeout(120), Leaving(client, "r1", "part").holding(stopping):
        waiting = await start_waiting(port, limit_s=2, SETTLE_S="1", programs=str(tmp_path))
        while not asked.exists():
            await asyncio.sleep(0.01)
        stopping.set()
        while not await client.zcard("penstock:{r1}:leaving"):
            await asyncio.sleep(0.01)
        told.touch()
        _, error = await waiting.communicate()
    assert waiting.returncode == 0 and b"1 processes of run r1 are still stopping after 2 s" in error


async def test_a_process_that_was_killed_holds_nothing_up(client: Redis, port: int) -> None:
    seconds, _ = await client.time()
    await client.zadd("penstock:{r1}:leaving", {"killed@host:1": (int(seconds) - 31) * 1000})
    async with asyncio.timeout(60):
        assert await (await start_waiting(port)).wait() == 0
    await client.zrem("penstock:{r1}:leaving", "killed@host:1")


async def test_redis_is_reached_after_its_name_has_gone(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Service is deleted at once. Connections that are made afterwards go to the last address."""
    await client.ping()
    await client.connection_pool.disconnect()

    def gone(host: str, *arguments: object, **options: object) -> object:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found(host, *arguments, **options)  # type: ignore[arg-type]

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", gone)
    assert await client.ping()
    assert await client.payloads.run(lambda blocking: blocking.ping())  # type: ignore[attr-defined]
    stranger = connect(RedisConfig(url="redis://localhost:1/0"))
    with pytest.raises(Exception, match="Name or service not known"):
        await stranger.ping()
    await stranger.aclose()
