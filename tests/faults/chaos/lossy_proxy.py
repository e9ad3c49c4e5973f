"""A TCP proxy in front of Redis that sometimes forwards an append and loses the reply."""

from __future__ import annotations

import asyncio
import contextlib
import random

APPEND_MARK = b":group:"
"""Every append's SET contains this, and no other request of a producer does."""
CHUNK_BYTES = 1 << 16


class LossyProxy:
    """`num_lost` counts the lost replies."""

    def __init__(self, target_port: int, share: float, seed: int) -> None:
        self.target_port = target_port
        self.share = share
        self.random = random.Random(seed)
        self.num_lost = 0
        self.port = 0

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        writers = [to_client]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self.target_port)
            writers.append(to_redis)
            losing = asyncio.Event()
            pumps = {
                asyncio.create_task(self._requests(from_client, to_redis, losing)),
                asyncio.create_task(self._replies(from_redis, to_client, losing)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        for writer in writers:
            writer.close()

    async def _requests(
        self, from_client: asyncio.StreamReader, to_redis: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        while data := await from_client.read(CHUNK_BYTES):
            if APPEND_MARK in data and self.random.random() < self.share:
                losing.set()
            to_redis.write(data)
            await to_redis.drain()

    async def _replies(
        self, from_redis: asyncio.StreamReader, to_client: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        """Forward replies. Returns, which closes the connection, at a reply that is to be lost: Redis has executed the
        request."""
        while data := await from_redis.read(CHUNK_BYTES):
            if losing.is_set():
                self.num_lost += 1
                return
            to_client.write(data)
            await to_client.drain()
