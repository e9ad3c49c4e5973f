"""A TCP proxy that can be frozen: connections stay open, and not a byte passes in either direction."""

from __future__ import annotations

import asyncio
import contextlib

CHUNK_BYTES = 1 << 16


class FrozenProxy:
    """Forwards to a port of this machine. While frozen it also accepts new connections, and answers nothing."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[asyncio.Task[None]] = set()

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def __aenter__(self) -> FrozenProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
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
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target_port)
                writers.append(to_server)
                await asyncio.gather(self._pump(from_client, to_server), self._pump(from_server, to_client))
        finally:
            for writer in writers:
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
