"""A TCP proxy that makes the faults of a network between two processes.

| fault        | connections that are open                  | new connections                   |
|--------------|--------------------------------------------|-----------------------------------|
| `delay`      | every chunk arrives late                   | likewise                          |
| `cut`        | are reset                                  | are reset at once                 |
| `half_open`  | the far end is gone, and nobody says so    | are accepted and never answered   |
| `black_hole` | nothing arrives, in either direction       | likewise                          |
| `one_way`    | nothing arrives in one of the directions   | likewise                          |
| lost replies | reset after a marked request was executed  | as before                         |

Bytes that a black hole or a one-way fault holds back are delivered after `heal`, as TCP's retransmissions deliver them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

CHUNK_BYTES = 1 << 16
START_S = 60.0
Direction = Literal["to_server", "to_client"]
Target = tuple[str, int]


@dataclass(frozen=True)
class LostReplies:
    """Lose the replies to this share of the requests that contain `mark`."""

    mark: bytes
    share: float
    seed: int


@dataclass(eq=False)
class Link:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    is_losing: bool = False
    is_reset: asyncio.Event = field(default_factory=asyncio.Event)
    handler: asyncio.Task[Any] | None = None


class FaultyProxy:
    """Forwards connections to `target`, and makes faults. Call it from the event loop that entered it.

    `target` may be a function, which is called for each connection. `num_lost` counts lost replies, `num_connections`
    the connections so far."""

    def __init__(
        self,
        target: Target | Callable[[], Target],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lost_replies: LostReplies | None = None,
    ) -> None:
        self.target = target if callable(target) else lambda: target
        self.host = host
        self.port = port
        self.lost_replies = lost_replies
        self.random = random.Random(lost_replies.seed if lost_replies else 0)
        self.num_lost = 0
        self.num_connections = 0
        self._delay_s = 0.0
        self._is_cut = False
        self._is_half_open = False
        self._links: set[Link] = set()
        self._open: dict[Direction, asyncio.Event] = {"to_server": asyncio.Event(), "to_client": asyncio.Event()}

    async def __aenter__(self) -> FaultyProxy:
        self.heal()
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        handlers = {link.handler for link in self._links if link.handler is not None}
        await _cancel(handlers)

    # ── faults ──

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def cut(self) -> None:
        self._is_cut = True
        for link in list(self._links):
            _reset(link)

    def half_open(self) -> None:
        self._is_half_open = True
        for link in list(self._links):
            if link.server is not None:
                link.server.close()

    def black_hole(self) -> None:
        for direction in self._open.values():
            direction.clear()

    def one_way(self, silent: Direction) -> None:
        self._open[silent].clear()

    def heal(self) -> None:
        """Forward everything again. Connections that a half-open fault left are reset."""
        if self._is_half_open:
            for link in list(self._links):
                _reset(link)
        self._delay_s, self._is_cut, self._is_half_open = 0.0, False, False
        for direction in self._open.values():
            direction.set()

    # ── forwarding ──

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        link = Link(to_client, handler=asyncio.current_task())
        self._links.add(link)
        self.num_connections += 1
        try:
            if self._is_cut:
                _reset(link)
            elif not self._is_half_open:
                with contextlib.suppress(OSError):
                    from_server, link.server = await asyncio.open_connection(*self.target())
                    await self._forward(link, from_client, from_server)
            if self._is_half_open:
                await link.is_reset.wait()
        except asyncio.CancelledError:
            pass
        finally:
            self._links.discard(link)
            _close(link)

    async def _forward(self, link: Link, from_client: asyncio.StreamReader, from_server: asyncio.StreamReader) -> None:
        assert link.server is not None
        pumps = [
            self._pump("to_server", link, from_client, link.server),
            self._pump("to_client", link, from_server, link.client),
        ]
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(pump) for pump in pumps}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(tasks)

    async def _pump(
        self, direction: Direction, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._open[direction].wait()
                if direction == "to_server":
                    link.is_losing = link.is_losing or self._loses_reply_to(data)
                elif link.is_losing:
                    self.num_lost += 1
                    return
                sink.write(data)
                await sink.drain()

    def _loses_reply_to(self, request: bytes) -> bool:
        lost = self.lost_replies
        return lost is not None and lost.mark in request and self.random.random() < lost.share


class ProxyThread:
    """A FaultyProxy in a thread of its own, for tests without an event loop. Faults are made by `do`.

    proxy.do("delay", 0.2)"""

    def __init__(self, target: Target | Callable[[], Target], **options: Any) -> None:
        self.proxy = FaultyProxy(target, **options)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._ending: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        assert self._started.wait(START_S), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(START_S)

    @property
    def port(self) -> int:
        return self.proxy.port

    def do(self, fault: str, *arguments: Any) -> None:
        async def act() -> None:
            getattr(self.proxy, fault)(*arguments)

        self._wait(act())

    def _wait(self, call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(START_S)

    async def _run(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        async with self.proxy:
            self._started.set()
            await self._ending.wait()


def _reset(link: Link) -> None:
    """Close both ends with a reset instead of an orderly end."""
    link.is_reset.set()
    for writer in (link.client, link.server):
        if writer is not None:
            with contextlib.suppress(OSError):
                taken: socket.socket = writer.get_extra_info("socket")
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


def _close(link: Link) -> None:
    for writer in (link.client, link.server):
        if writer is not None:
            writer.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
