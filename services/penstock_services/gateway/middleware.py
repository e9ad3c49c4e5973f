"""ASGI middleware of the REST interface: metrics, checks of what browsers send, authentication and the body, in this
order.

The scope of a request carries its `Observation`, and after authentication its `Caller`, which routes pass to handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.logs import bind
from penstock.protocols.answers import CLIENT_CLOSED_REQUEST
from penstock_services.gateway import problems
from penstock_services.gateway.access import Access
from penstock_services.gateway.allowed_hosts import AllowedHosts
from penstock_services.gateway.connections import DISCARD_TIMEOUT_S
from penstock_services.gateway.metrics.gateway import GatewayMetrics
from penstock_services.gateway.metrics.requests import Observation

OPEN_PATHS = frozenset({"/", "/healthz", "/startupz", "/readyz", "/metrics", "/docs"})
"""Answered without a key: probes, scrapes and the files of the console and of the API's page show no prompts and no
weights."""
DATASET_TYPES = {"application/x-ndjson": "jsonl", "application/vnd.apache.parquet": "parquet"}
"""Format of a dataset by the Content-Type of its upload."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(given: str) -> str:
    """The client's request id if it sent a usable one, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


class MetricsMiddleware:
    """Counts and times every request, and gives it an id that log lines and the response carry."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self.metrics.observe("rest") as seen:
            request_id = request_id_of(Headers(scope=scope).get("x-request-id", ""))
            bind(request_id=request_id)
            scope["observation"], scope["request_id"] = seen, request_id
            try:
                await self.app(scope, receive, _watch(send, seen, request_id))
            finally:
                seen.route = getattr(scope.get("route"), "path", seen.route)


class BrowserMiddleware:
    """Refuses what a browser sends for another site.

    A page whose name was pointed at this gateway's address (DNS rebinding) sends a Host that is not the gateway's. A
    page of another site sends its own Origin. Programs send neither."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if not self.hosts.allow(host):
                detail = f"this gateway is not {host[:80]!r}; add the name to gateway.allowed_hosts if it should be"
                await _refuse(problems.problem(421, "UNKNOWN_HOST", detail), scope, receive, send)
                return
            if origin is not None and not self.hosts.allow_origin(origin, host):
                detail = f"pages of {origin[:80]!r} may not call this gateway; see gateway.allowed_hosts"
                await _refuse(problems.problem(403, "FOREIGN_ORIGIN", detail), scope, receive, send)
                return
        await self.app(scope, receive, send)


class AuthenticationMiddleware:
    """Finds the caller of a request by its key and limits how often the key is used."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                scope["caller"] = self.access.authenticate(_authorization(scope), scope["request_id"])
            except PenstockError as error:
                await _refuse(problems.answer_to(scope["path"], error), scope, receive, send)
                return
        await self.app(scope, receive, send)


def _authorization(scope: Scope) -> str:
    """The Authorization header. Anthropic's clients send the key as X-Api-Key instead."""
    headers = Headers(scope=scope)
    key = headers.get("x-api-key", "")
    return headers.get("authorization", f"Bearer {key}" if key else "")


class BodyLimitMiddleware:
    """Reads the whole body before a route runs, and refuses one that is too large or too slow. No route sees a body
    that ended early."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                body, has_more = await self._read_body(receive)
        except ClientDisconnect:
            scope["observation"].code = str(CLIENT_CLOSED_REQUEST)
            return
        except TimeoutError:
            detail = f"the body did not arrive within {self.timeout_s:g} s; send it again"
            refusal = problems.problem(408, "REQUEST_TIMEOUT", detail, headers={"Connection": "close"})
            await _refuse(refusal, scope, receive, send)
            return
        if 0 < len(body) <= self.max_body_bytes and not _is_known_type(Headers(scope=scope).get("content-type", "")):
            detail = f"send the body as application/json, and a dataset as {' or '.join(DATASET_TYPES)}"
            await _refuse(problems.problem(415, "UNSUPPORTED_MEDIA_TYPE", detail), scope, receive, send)
            return
        if len(body) <= self.max_body_bytes:
            await self.app(scope, _replay(body, receive), send)
            return
        if has_more:
            await _discard(receive)
        detail = f"the body is larger than {self.max_body_bytes} bytes; split the request"
        refusal = problems.problem(413, "BODY_TOO_LARGE", detail, headers={"Connection": "close"})
        await _refuse(refusal, scope, receive, send)

    async def _read_body(self, receive: Receive) -> tuple[bytes, bool]:
        """The body up to the first piece that exceeds the limit, and whether more follows."""
        body, has_more = bytearray(), True
        while has_more and len(body) <= self.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        return bytes(body), has_more


def _is_known_type(content_type: str) -> bool:
    """Whether the routes take bodies of this type. A page of another site cannot send any of them unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind in DATASET_TYPES or (kind.startswith("application/") and "+json" in kind)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(("/console/", "/docs/"))


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before any route is chosen; metrics show the route `refused`."""
    scope["observation"].route = "refused"
    await response(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read the rest of a body for a while: most clients read the answer only after they have sent everything."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while (await receive()).get("more_body", False):
                pass


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body once, then what follows it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _watch(send: Send, seen: Observation, request_id: str) -> Send:
    """A `send` that notes the status for the metrics and adds the request id to the response."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.code = str(message["status"])
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
        await send(message)

    return watched
