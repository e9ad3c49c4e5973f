"""Clients that send too much, too slowly or not at all, over real sockets: they are refused and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis

from penstock.codec import encode_group
from penstock.config.run import RunConfig
from penstock.config.service import GatewayLimits
from penstock.replay.queue import RedisReplayQueue
from penstock.v1 import runs_pb2, runs_pb2_grpc
from support.gateways import PROMPT, RUN, Gateway, group_of, run_config, running, submit

Configure = Callable[..., RunConfig]
HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
DEADLINE_S = 100.0


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Configure:
    return lambda **limits: run_config(redis_process.url, tmp_path, limits=GatewayLimits(**limits))


class Client:
    """One raw connection to the REST port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def read_to_end(self) -> bytes:
        """Everything that the gateway sends until it closes the connection."""
        received = b""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    received += piece
        return received

    async def status(self) -> int:
        """Status of the only answer."""
        answer = await self.read_to_end()
        return int(answer.split(b" ")[1]) if answer else 0


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, port: int = 0) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port or gateway.rest_port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def is_answered(gateway: Gateway) -> bool:
    return (await gateway.rest.get("/healthz")).status_code == 200


async def test_a_header_is_refused_before_it_costs_anything(configure: Configure) -> None:
    async with running(configure(max_header_bytes=4096)) as gateway:
        for sent in (
            HEAD + b"X-Long: " + b"a" * 300_000,
            b"GET /" + b"a" * 300_000,
            HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
            b"".join([HEAD, *(b"X-%d: a\r\n" % number for number in range(20_000))]),
        ):
            async with connected(gateway) as client:
                await client.send(sent)
                answer = await client.read_to_end()
                assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
                assert json.loads(answer.split(b"\r\n\r\n")[1])["reason"] == "HEADERS_TOO_LARGE"
            assert await is_answered(gateway)
        async with connected(gateway) as client:
            await client.send(HEAD + b"Connection: close\r\nX-Short: " + b"a" * 2000 + b"\r\n\r\n")
            assert await client.status() == 200


async def test_the_trailer_of_a_body_has_the_limit_of_headers(configure: Configure) -> None:
    async with running(configure(max_header_bytes=4096)) as gateway, connected(gateway) as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Long: " + b"a" * 1000)
        for _ in range(8):
            await client.send(b"a" * 100_000)
        assert await client.read_to_end() == b"", "closed, and never handed to a route"
        assert await is_answered(gateway)


HALVES: dict[str, Callable[[Client], Awaitable[None]]] = {
    "nothing": lambda client: client.send(b""),
    "headers": lambda client: client.send(HEAD + b"X-Half: a"),
    "second_request": lambda client: client.send(HEAD + b"\r\n" + HEAD),
    "body": lambda client: client.send(b"POST" + HEAD[3:] + b"Content-Length: 1000\r\n\r\nabc"),
    "refused_body": lambda client: client.send(b"POST /v1/runs HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\na"),
    "idle": lambda client: client.send(HEAD + b"\r\n"),
}


async def test_half_sent_requests_are_ended_and_others_answered(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_services.gateway.rest.DISCARD_TIMEOUT_S", 0.3)
    limits = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "keep_alive_s": 0.5}
    async with running(configure(**limits)) as gateway, contextlib.AsyncExitStack() as stack:
        clients = {}
        for name, send_half in HALVES.items():
            for number in range(5):
                client = await stack.enter_async_context(connected(gateway))
                clients[name, number] = client
                await send_half(client)
        assert await is_answered(gateway)
        answers = await asyncio.gather(*(client.read_to_end() for client in clients.values()))
        assert await is_answered(gateway)
    statuses = {name: answer.split(b" ")[1:2] for (name, _), answer in zip(clients, answers, strict=True)}
    assert statuses["headers"] == statuses["nothing"] == statuses["body"] == [b"408"], statuses


async def test_bytes_that_come_one_by_one_do_not_keep_a_request_alive(configure: Configure) -> None:
    async with running(configure(header_timeout_s=0.5)) as gateway, connected(gateway) as client:

        async def drip() -> None:
            await client.send(HEAD + b"X-Slow: ")
            while True:
                await client.send(b"a")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await client.status() in (408, 0)
        dripping.cancel()


async def test_empty_lines_between_requests_do_not_keep_a_connection_alive(configure: Configure) -> None:
    config = configure(header_timeout_s=0.5, keep_alive_s=10 * DEADLINE_S)
    async with running(config) as gateway, connected(gateway) as client:
        await client.send(HEAD + b"\r\n")
        async with asyncio.timeout(DEADLINE_S):
            await client.reader.readuntil(b"}")
        await client.send(b"\r\n")
        assert await client.read_to_end() == b""


async def test_a_client_that_reads_nothing_is_disconnected(configure: Configure) -> None:
    async with running(configure(send_timeout_s=0.5)) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", gateway.rest_port))
            request = b"GET /console/console.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        await loop.sock_sendall(client, request * 100)
                        await asyncio.sleep(0.01)
        assert await is_answered(gateway)


async def test_a_body_that_ends_early_reaches_no_route(configure: Configure) -> None:
    line = b'{"prompt": "2+2?", "data_source": "gsm8k"}\n'
    async with running(configure()) as gateway:
        authorization = gateway.rest.headers.get("authorization", "")
        async with connected(gateway) as client:
            await client.send(
                b"PUT " + RUN.encode() + b"/datasets/half HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/x-ndjson\r\n" + f"Authorization: {authorization}\r\n".encode() +
                b"Content-Length: %d\r\n\r\n" % (10 * len(line)) + line * 5
            )  # fmt: skip
            await is_answered(gateway)
        await is_answered(gateway)
        assert (await gateway.rest.get(f"{RUN}/datasets/half")).status_code == 404


@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_address"])
async def test_connections_are_limited(configure: Configure, setting: str) -> None:
    async with running(configure(**{setting: 3}, header_timeout_s=DEADLINE_S)) as gateway:
        async with contextlib.AsyncExitStack() as stack:
            kept = [await stack.enter_async_context(connected(gateway)) for _ in range(3)]
            for client in kept:
                await client.send(HEAD + b"\r\n")
                assert b" 200 " in await client.reader.readline()
            async with connected(gateway) as refused:
                answer = await refused.read_to_end()
                assert answer.startswith(b"HTTP/1.1 503 ") and b"TOO_MANY_CONNECTIONS" in answer
        async with asyncio.timeout(DEADLINE_S):
            while (await status_of_new_connection(gateway)) != 200:
                await asyncio.sleep(0.01)


async def status_of_new_connection(gateway: Gateway) -> int:
    async with connected(gateway) as client:
        await client.send(HEAD + b"Connection: close\r\n\r\n")
        return await client.status()


async def test_watchers_leave_connections_to_redis_for_other_requests(
    configure: Configure, queue: RedisReplayQueue
) -> None:
    """More watchers than the gateway has connections to Redis, all woken at once."""
    num_watchers = 150
    config = configure(max_redis_connections=8, header_timeout_s=DEADLINE_S)
    async with running(config) as gateway, contextlib.AsyncExitStack() as stack:
        await submit(gateway, PROMPT)
        authorization = gateway.rest.headers.get("authorization", "")
        request = f"GET {RUN}/results?cursor=0 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {authorization}\r\n\r\n"
        watchers = [await stack.enter_async_context(connected(gateway)) for _ in range(num_watchers)]
        for watcher in watchers:
            await watcher.send(request.encode())
        async with asyncio.timeout(DEADLINE_S):
            for watcher in watchers:
                assert b" 200 " in await watcher.reader.readline()
        [lease] = await queue.lease("s", 1)
        await queue.append(lease, encode_group(group_of(1, 1)), 3)
        async with asyncio.timeout(DEADLINE_S):
            answers = [(await gateway.rest.get(RUN)).status_code for _ in range(20)]
            events = await asyncio.gather(*(watcher.reader.readuntil(b"event: ") for watcher in watchers))
            kinds = [await watcher.reader.readline() for watcher in watchers]
    assert answers == [200] * 20 and len(events) == num_watchers
    assert kinds == [b"result\n"] * num_watchers


async def test_scrapes_and_probes_share_one_connection_to_redis(gateway: Gateway, queue: RedisReplayQueue) -> None:
    before: Any = await queue.client.info("clients")
    answers = await asyncio.gather(*(gateway.rest.get(path) for path in ("/metrics", "/readyz") * 40))
    after: Any = await queue.client.info("clients")
    assert {answer.status_code for answer in answers} == {200}
    assert after["connected_clients"] - before["connected_clients"] <= 3


async def test_a_grpc_connection_that_says_nothing_is_closed(configure: Configure) -> None:
    async with running(configure(header_timeout_s=0.5)) as gateway:
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(gateway, gateway.grpc_port)) for _ in range(5)]
            await asyncio.gather(*(client.read_to_end() for client in silent))
        runs: Any = runs_pb2_grpc.RunServiceStub(gateway.channel)
        # The time of the silent ones holds for this connection too, so on a busy machine it may take more than one try.
        assert (await runs.GetRun(runs_pb2.GetRunRequest(), wait_for_ready=True)).run == "test"


async def test_large_grpc_metadata_is_refused(configure: Configure) -> None:
    async with running(configure(max_header_bytes=4096)) as gateway:
        runs: Any = runs_pb2_grpc.RunServiceStub(gateway.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.GetRun(runs_pb2.GetRunRequest(), metadata=(("x-long", "a" * 12_000),))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await runs.GetRun(runs_pb2.GetRunRequest())).run == "test"


async def test_grpc_connections_are_limited(configure: Configure) -> None:
    async with running(configure(max_connections=2)) as gateway:
        runs: Any = runs_pb2_grpc.RunServiceStub(gateway.channel)
        assert (await runs.GetRun(runs_pb2.GetRunRequest())).run == "test"
        async with contextlib.AsyncExitStack() as stack:
            held = [await stack.enter_async_context(connected(gateway, gateway.grpc_port)) for _ in range(5)]
            ended = [asyncio.create_task(client.read_to_end()) for client in held]
            async with asyncio.timeout(DEADLINE_S):
                while sum(task.done() for task in ended) < 4:
                    await asyncio.sleep(0.01)
            assert (await runs.GetRun(runs_pb2.GetRunRequest())).run == "test"
            for task in ended:
                task.cancel()
