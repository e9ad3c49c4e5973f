"""The gateway as a process: its ports, its metrics, life without Redis, and how it stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.client import PenstockClient
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Unavailable
from penstock.machine import free_port
from penstock.store.redis_client import check_primary
from penstock.v1 import (
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway import __main__ as command
from penstock_services.gateway.server import serve
from penstock_services.gateway.sessions.rewards import SessionRewards
from support.gateways import PROMPT, RUN, Gateway, assert_problem, post_prompts, run_config, running
from support.redis_server import RedisProcess


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda **gateway: run_config(redis_process.url, tmp_path, **gateway)


async def test_metrics_count_requests_and_show_the_queue(gateway: Gateway) -> None:
    await post_prompts(gateway, PROMPT)
    await gateway.rest.get(f"{RUN}/prompts/9")
    await runs_pb2_grpc.RunServiceStub(gateway.channel).GetRun(runs_pb2.GetRunRequest())
    text, took = (await gateway.rest.get("/metrics")).text, "penstock_gateway_request_duration_seconds"
    for line in (
        'penstock_gateway_requests_total{code="200",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        'penstock_gateway_requests_total{code="404",protocol="rest",route="/v1/runs/{run}/prompts/{prompt_id}"} 1.0',
        'penstock_gateway_requests_total{code="OK",protocol="grpc",route="/penstock.v1.RunService/GetRun"} 1.0',
        'penstock_gateway_inflight_requests{protocol="rest"} 1.0',
        'penstock_gateway_inflight_requests{protocol="grpc"} 0.0',
        took + '_bucket{le="+Inf",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        took + '_count{protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        'penstock_queue_depth{queue="prompts"} 1.0',
        'penstock_queue_bytes{queue="groups"} 0.0',
        "penstock_conservation_error 0.0",
        "penstock_trained_total 0.0",
        'penstock_rollout_servers{state="READY"} 0.0',
    ):
        assert line in text.splitlines(), text


@pytest.mark.parametrize("setting", ["port", "grpc_port"])
async def test_a_port_in_use_is_one_clear_line(configure: Callable[..., RunConfig], setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = f"port {port} on 127.0.0.1 is in use; set gateway.{setting} to a free one or 0"
        with pytest.raises(Unavailable, match=f"^{expected}$"):
            await serve(configure(**{setting: port}))


async def test_without_redis_it_lives_but_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.retries.FIRST_PAUSE_S", 1000.0)  # the client does not try again
    async with running(run_config(f"redis://127.0.0.1:{free_port()}/0", tmp_path)) as gateway:
        for path in ("/healthz", "/startupz"):
            assert (await gateway.rest.get(path)).status_code == 200
        not_ready = await gateway.rest.get("/readyz")
        assert_problem(not_ready, 503, "UNAVAILABLE")
        assert not_ready.json()["state"] == "stale"
        assert not_ready.headers["retry-after"] == "1"
        for path in (RUN, f"{RUN}/policies", f"{RUN}/servers"):
            assert_problem(await gateway.rest.get(path), 503, "UNAVAILABLE")
        text = (await gateway.rest.get("/metrics")).text
        assert "penstock_gateway_requests_total" in text and "penstock_queue_depth" not in text
        async with PenstockClient(gateway.url, api_key=gateway.key) as client:
            with pytest.raises(Unavailable, match="Redis does not answer"):
                await client.get_run()


async def test_it_is_not_ready_while_redis_reads_its_file(tmp_path: Path) -> None:
    """Redis answers some commands meanwhile, but none that a request needs."""
    process = RedisProcess(tmp_path / "redis")
    process.start()
    try:
        async with redis.Redis.from_url(process.url, socket_timeout=600) as client:
            await client.eval("for i = 1, 200000 do redis.call('SET', i, '') end", 0)
        process.kill()
        process.start("--key-load-delay", "300")  # it reads for a minute, and answers meanwhile
        async with running(run_config(process.url, tmp_path)) as gateway:
            assert_problem(await gateway.rest.get("/readyz"), 503, "UNAVAILABLE")
    finally:
        process.kill()


class WithoutHello(redis.Redis):
    """A proxy that does not know HELLO."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await super().execute_command("UNKNOWN" if args[0] == "HELLO" else args[0], *args[1:], **options)


async def test_a_redis_without_hello_is_a_primary_if_it_answers(redis_process: RedisProcess, tmp_path: Path) -> None:
    async with WithoutHello.from_url(redis_process.url) as client:
        await check_primary(client)
    async with WithoutHello.from_url(f"redis://127.0.0.1:{free_port()}/0") as client:
        with pytest.raises(Unavailable, match="Redis does not answer"):
            await check_primary(client)


async def test_sigterm_lets_a_request_in_flight_finish(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_services.gateway.server.STOP_GRACE_S", 600.0)
    async with running(configure()) as gateway:
        await stop_during_a_request(gateway)


async def stop_during_a_request(gateway: Gateway) -> None:
    address = gateway.config.folder / "gateway.json"
    assert json.loads(address.read_text()) == {
        "host": "127.0.0.1",
        "rest_port": gateway.rest_port,
        "grpc_port": gateway.grpc_port,
        "pid": os.getpid(),
        "scheme": "http",
    }
    stopped = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        content = json.dumps({"prompts": [PROMPT]}).encode()
        yield content[:20]
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(100):
            await gateway.stop.wait()
        stopped.set()
        yield content[20:]

    response = await gateway.rest.post(f"{RUN}/prompts", content=body(), headers={"Content-Type": "application/json"})
    assert stopped.is_set() and response.json()["prompt_ids"] == [1]
    async with asyncio.timeout(100):
        await gateway.task
    assert not address.exists()


async def test_a_sweep_under_way_does_not_keep_the_gateway_from_stopping(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow Redis it may take `4 * redis.timeout_s`. Another gateway, or a later one, repeats it."""
    is_sweeping = asyncio.Event()

    async def sweep_once(_: SessionRewards) -> None:
        is_sweeping.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(SessionRewards, "sweep_once", sweep_once)
    async with running(configure()):
        await is_sweeping.wait()


async def test_a_gateway_whose_redis_becomes_a_replica_is_not_ready(
    configure: Callable[..., RunConfig], redis_client: redis.Redis, tmp_path: Path
) -> None:
    """A failover may lose the newest writes, and with them prompts that were acknowledged: see docs/security.md."""
    primary = RedisProcess(tmp_path / "primary")
    primary.start()
    try:
        async with running(configure()) as gateway:
            assert (await gateway.rest.get("/readyz")).status_code == 200
            await redis_client.replicaof("127.0.0.1", primary.port)
            refused = await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [PROMPT]})
            assert_problem(refused, 503, "UNAVAILABLE")
            assert "replica" in refused.json()["detail"]
            assert_problem(await gateway.rest.get("/readyz"), 503, "UNAVAILABLE")
    finally:
        await redis_client.replicaof("no", "one")
        primary.kill()


def test_an_error_of_a_task_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*_: object, **__: object) -> int:
        raise ExceptionGroup("tasks", [ConfigError("redis.url names a replica")])

    monkeypatch.setattr(command, "_run", run)
    assert command.main(["--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "penstock gateway: error: redis.url names a replica\n"
