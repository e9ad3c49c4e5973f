"""The proxy of the fault tests makes the faults that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from support.faults.proxy import FaultyProxy, LostReplies

SILENCE_S = 0.2
"""How long a reply must fail to come. It comes at once where there is no fault."""
DEADLINE_S = 60.0


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, text: bytes) -> None:
        self.writer.write(text)

    async def reply(self) -> bytes:
        """The next reply; empty at the end of the connection."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read(100)

    async def is_silent(self) -> bool:
        try:
            async with asyncio.timeout(SILENCE_S):
                await self.reader.read(100)
        except TimeoutError:
            return True
        return False


class Echo:
    """Answers every request with itself, and keeps what it has received."""

    def __init__(self) -> None:
        self.received = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                self.received += data
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def proxied(lost_replies: LostReplies | None = None) -> AsyncIterator[tuple[FaultyProxy, Echo, Connect]]:
    echo, clients = Echo(), list[Client]()
    server = await asyncio.start_server(echo.answer, "127.0.0.1", 0)
    async with server, FaultyProxy(server.sockets[0].getsockname(), lost_replies=lost_replies) as proxy:

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", proxy.port)))
            return clients[-1]

        yield proxy, echo, connect
        for client in clients:
            client.writer.close()


async def test_a_black_hole_and_a_one_way_link_deliver_after_they_heal() -> None:
    async with proxied() as (proxy, echo, connect):
        client = await connect()
        client.send(b"a")
        assert await client.reply() == b"a"
        proxy.one_way("to_client")
        client.send(b"b")
        await until(lambda: echo.received == b"ab")
        assert await client.is_silent()
        proxy.heal()
        assert await client.reply() == b"b"
        proxy.black_hole()
        client.send(b"c")
        assert await client.is_silent() and echo.received == b"ab"
        proxy.heal()
        assert await client.reply() == b"c"
        proxy.one_way("to_server")
        client.send(b"d")
        assert await client.is_silent() and echo.received == b"abc"


async def test_a_cut_resets_and_a_half_open_link_stays_silent() -> None:
    async with proxied() as (proxy, _, connect):
        client = await connect()
        client.send(b"a")
        assert await client.reply() == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await client.reply()
        proxy.heal()
        client = await connect()
        client.send(b"b")
        assert await client.reply() == b"b"
        proxy.half_open()
        newcomer = await connect()
        await until(lambda: proxy.num_connections == 3)
        for silent in (client, newcomer):
            silent.send(b"c")
            assert await silent.is_silent()
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await newcomer.reply()


async def test_a_late_chunk_arrives_and_a_lost_reply_belongs_to_a_request_that_was_executed() -> None:
    async with proxied(LostReplies(b"x", 1.0, 0)) as (proxy, echo, connect):
        proxy.delay(SILENCE_S)
        client = await connect()
        client.send(b"a")
        assert await client.is_silent() and await client.reply() == b"a"
        proxy.heal()
        client.send(b"x")
        assert await client.reply() == b""
        assert (echo.received, proxy.num_lost) == (b"ax", 1)
