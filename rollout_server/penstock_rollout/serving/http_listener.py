"""The HTTP port of a rollout server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from penstock.cancellation import end_task
from penstock.errors import Unavailable

STOP_GRACE_S = 5
START_S = 20.0
KEEP_ALIVE_S = 30
MAX_CONNECTIONS = 1000


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers. The process has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def http_listener(app: Starlette, host: str, port: int) -> AsyncIterator[int]:
    """Listen inside the block. Yields the port, which is a free one if `port` is 0."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise Unavailable(
            f"port {port} on {host} cannot be opened ({error.strerror}); set rollout.http_port to a free one or 0"
        ) from error
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S, limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]), name="http")
    try:
        async with asyncio.timeout(START_S):
            await server.listening.wait()
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * STOP_GRACE_S):
                await asyncio.shield(serving)
        await end_task(serving)
        listening.close()
