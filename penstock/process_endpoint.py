"""The HTTP endpoint of a process: metrics for Prometheus, and answers to the probes of a cluster.

| path        | 200 when                                             | 503 when                              |
|-------------|------------------------------------------------------|---------------------------------------|
| `/metrics`  | always                                               |                                       |
| `/healthz`  | the event loop turns, or the process has not started | the loop has stood for `MAX_STALL_S`  |
| `/startupz` | the process has once left the state `loading`        | it still loads                        |
| `/readyz`   | the state is `ready`                                 | it is `loading`, `stale` or `draining` |

`/readyz` answers `{"state": …, "detail": …}`. A separate thread answers, so that a process whose loop is blocked,
by an import for example, still says so. The gateway answers the same paths on its REST port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from penstock.errors import Unavailable

MAX_STALL_S = 60.0
"""Seconds without a turn of the event loop after which a started process is no longer alive."""
TICK_S = 1.0
POLL_S = 0.1
"""How soon `close` is noticed."""
REQUEST_TIMEOUT_S = 10.0
"""Time that a client has to send its request and to read the answer."""
JSON = ("Content-Type", "application/json")
_BUSY = HTTPStatus.SERVICE_UNAVAILABLE

ServingState = Literal["loading", "stale", "ready", "draining"]


@dataclass(frozen=True)
class Readiness:
    """Whether a process does its work, and if not, why."""

    state: ServingState
    """`loading`: it has not started yet, or starts a part again. `stale`: it is up, but must not work: it serves an old
    version, or cannot reach Redis. `draining`: it was asked to stop, and ends its work."""
    detail: str = ""


class ProcessEndpoint:
    """Serves the paths above from a daemon thread, between `listen` and `close`.

    `readiness` is called by that thread at each probe, and may be replaced at any time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.readiness: Callable[[], Readiness] = lambda: Readiness("loading", "the process starts")
        self.port = 0
        self._metrics = make_wsgi_app(registry)
        self._rendering = threading.Lock()
        """Held while an answer is made. A fork waits for it, so that no child inherits a lock of a metric that only a
        thread of its parent could release."""
        self._is_started = False
        self._turned_at = time.monotonic()
        self._tick: asyncio.TimerHandle | None = None
        self._server: WSGIServer | None = None

    def listen(self, host: str, port: int) -> None:
        """Open the port (0: a free one). Call it from the event loop that `/healthz` is to watch."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            kind = type("_Server", (_Server,), {"address_family": family})
            self._server = make_server(host, port, self._answer, kind, handler_class=_QuietHandler)
        except OSError as error:
            raise Unavailable(
                f"port {port} on {host} cannot be opened ({error.strerror}); set metrics_port to a free one or 0"
            ) from error
        serve: Callable[[float], None] = self._server.serve_forever
        threading.Thread(target=serve, args=(POLL_S,), name="process-endpoint", daemon=True).start()
        _hold_still_for_forks(self)
        self._turn(asyncio.get_running_loop())
        self.port = self._server.server_port

    def close(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turned_at = time.monotonic()
        self._tick = loop.call_later(TICK_S, self._turn, loop)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        probes = {"/healthz": self._healthz, "/startupz": self._startupz, "/readyz": self._readyz}
        path = environ.get("PATH_INFO", "")
        with self._rendering:
            if path == "/metrics":
                scraped: list[bytes] = self._metrics(environ, start_response)
                return scraped
            if path in probes:
                status, fields = probes[path]()
            else:
                status, fields = HTTPStatus.NOT_FOUND, {"detail": f"ask for /metrics, {', '.join(probes)}"}
        body = json.dumps(fields).encode()
        start_response(f"{status.value} {status.phrase}", [JSON, ("Content-Length", str(len(body)))])
        return [body]

    def _healthz(self) -> tuple[HTTPStatus, dict[str, str]]:
        stalled_s = time.monotonic() - self._turned_at
        if stalled_s < MAX_STALL_S or not self._has_started():
            return HTTPStatus.OK, {"status": "alive"}
        return _BUSY, {"status": "stuck", "detail": f"the event loop has not turned for {stalled_s:.0f} s"}

    def _startupz(self) -> tuple[HTTPStatus, dict[str, str]]:
        if self._has_started():
            return HTTPStatus.OK, {"status": "started"}
        return _BUSY, {"status": "starting", "detail": self.readiness().detail}

    def _readyz(self) -> tuple[HTTPStatus, dict[str, str]]:
        readiness = self.readiness()
        return HTTPStatus.OK if readiness.state == "ready" else _BUSY, asdict(readiness)

    def _has_started(self) -> bool:
        self._is_started = self._is_started or self.readiness().state != "loading"
        return self._is_started

    def _close_in_child(self) -> None:
        """Close the child's copy of the port. Otherwise a child that outlives its parent would keep it."""
        self._rendering.release()
        if self._server is not None:
            self._server.socket.close()


@contextlib.contextmanager
def process_endpoint(registry: CollectorRegistry, host: str, port: int) -> Iterator[ProcessEndpoint]:
    """An endpoint that listens inside the block."""
    endpoint = ProcessEndpoint(registry)
    endpoint.listen(host, port)
    try:
        yield endpoint
    finally:
        endpoint.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name, as the standard library would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that went away or sent no request."""


class _QuietHandler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: probes come every few seconds."""


def _hold_still_for_forks(endpoint: ProcessEndpoint) -> None:
    """Let forks wait until no answer is being made. Such a hook cannot be removed, so it keeps no endpoint alive."""
    reference = weakref.ref(endpoint)

    def call(method: Callable[[ProcessEndpoint], object]) -> Callable[[], None]:
        def hook() -> None:
            if (found := reference()) is not None:
                method(found)

        return hook

    os.register_at_fork(
        before=call(lambda found: found._rendering.acquire()),
        after_in_parent=call(lambda found: found._rendering.release()),
        after_in_child=call(ProcessEndpoint._close_in_child),
    )
