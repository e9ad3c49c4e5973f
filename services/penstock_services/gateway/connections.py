"""REST connections: how many there may be, how large their headers may be, and how long they may stand still.

A connection is closed when a limit of `gateway.limits` is passed. A refusal is a problem document, like every other
error, if the client can still read one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.config.service import GatewayLimits
from penstock_services.gateway import problems

SWEEP_S = 0.5
"""Pause between two looks for connections that stand still."""
DISCARD_TIMEOUT_S = 5.0
"""How long the rest of a refused body is read: most clients read the answer only after they have sent everything."""


class Connections:
    """The open REST connections of a gateway. Only the event loop may use it."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        self.open: set[LimitedProtocol] = set()
        self.by_address: Counter[str] = Counter()

    def add(self, connection: LimitedProtocol, address: str) -> str:
        """Count a connection. Returns why it has to be refused; empty if it may stay."""
        limits = self.limits
        if len(self.open) >= limits.max_connections:
            return f"the gateway has {limits.max_connections} connections, which is its limit; try again later"
        if address and self.by_address[address] >= limits.max_connections_per_address:
            return f"{address} has {limits.max_connections_per_address} connections, which is the limit; close some"
        self.open.add(connection)
        self.by_address[address] += 1
        return ""

    def remove(self, connection: LimitedProtocol, address: str) -> None:
        if connection not in self.open:
            return
        self.open.discard(connection)
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]

    async def sweep(self) -> None:
        """Close connections that stand still, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = loop.time()
            for connection in list(self.open):
                connection.check(now)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. httptools has none, and joins the pieces of a header at quadratic cost.

    The time of a request counts from its first byte, or from the opening of the connection. It ends with the last byte
    of the body; what the gateway then does has its own deadlines."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = connections.limits
        self._all = connections
        self._address = ""
        self._is_refused = False
        self._reads_headers = True
        self._is_message_complete = True
        self._bytes_without_progress = 0
        """Bytes since the parser last completed the headers, a piece of a body, or a request."""
        self._read_due = math.inf
        self._write_due = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._read_due = self.loop.time() + self.limits.header_timeout_s
        if refusal := self._all.add(self, self._address):
            self._refuse(503, "TOO_MANY_CONNECTIONS", refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self, self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._bytes_without_progress += len(data)
        super().data_received(data)
        if self._read_due == math.inf and (self.cycle is None or self.cycle.response_complete):
            # Empty lines before a request begin none, but they end uvicorn's timer of an idle connection.
            self._read_due = self.loop.time() + self.limits.header_timeout_s
        if self._bytes_without_progress > self.limits.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        self._reads_headers, self._is_message_complete = True, False
        self._read_due = self.loop.time() + self.limits.header_timeout_s
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._bytes_without_progress > self.limits.max_header_bytes:
            num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if num_bytes > self.limits.max_header_bytes:
                self._refuse_headers()
                raise httptools.HttpParserError("the headers are too large")
        self._reads_headers, self._bytes_without_progress = False, 0
        self._read_due = self.loop.time() + self.limits.body_timeout_s + DISCARD_TIMEOUT_S
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_without_progress = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_message_complete, self._bytes_without_progress = True, 0
        self._read_due = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._is_message_complete:
            self._read_due = min(self._read_due, self.loop.time() + DISCARD_TIMEOUT_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._write_due = self.loop.time() + self.limits.send_timeout_s
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_due = math.inf
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "BAD_REQUEST", msg)

    def check(self, now: float) -> None:
        """Close the connection if the client has been too slow. Reading that the gateway paused counts as progress."""
        if now >= self._write_due:
            self.transport.abort()
        elif now >= self._read_due and not self.flow.read_paused:
            if self._reads_headers:
                self._refuse(408, "REQUEST_TIMEOUT", f"no request arrived within {self.limits.header_timeout_s:g} s")
            else:
                self.transport.close()

    def _refuse_headers(self) -> None:
        detail = f"the headers are larger than {self.limits.max_header_bytes} bytes"
        self._refuse(431, "HEADERS_TOO_LARGE", detail)

    def _refuse(self, status: int, reason: str, detail: str) -> None:
        """Answer without any route and close the connection. Does not interrupt an answer that is under way."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(problems.raw_problem(status, reason, detail))
        self.transport.close()
