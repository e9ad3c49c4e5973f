"""The REST interface: from a connection to the operation that answers a request.

A request passes, in this order: metrics, checks of what browsers send, the caller's key, the size of its body, its
route in FastAPI, its operation.

`Connections` and `LimitedProtocol` limit how many connections there may be, how large their headers may be, and how
long they may stand still. A connection is closed when a limit of `gateway.limits` is passed. A refusal is a problem
document, like every other error, if the client can still read one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import httptools
from fastapi import FastAPI
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json as encode_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.api.conversion import parse_json, request_of, to_json
from penstock.config.service import GatewayConfig, GatewayLimits
from penstock.errors import InvalidInput, PenstockError
from penstock.logs import bind
from penstock.protocols.answers import CLIENT_CLOSED_REQUEST
from penstock_services.gateway import problems
from penstock_services.gateway.access import Access, AllowedHosts, Caller
from penstock_services.gateway.metrics import GatewayMetrics
from penstock_services.gateway.operations import Operation, ServedOperation, check_scope

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 10.0
"""Keep-alive interval of an idle event stream: it sends a comment, so that proxies and clients keep it open."""
LARGE_BYTES = 16 * 1024
"""Messages from this size on are made JSON in a thread, so that other requests are answered meanwhile."""
DATASET_TYPES = {"application/x-ndjson": "jsonl", "application/vnd.apache.parquet": "parquet"}
"""Format of a dataset by the Content-Type of its upload."""
REQUEST = "penstock.request"
"""Where the ASGI scope holds the HttpRequest, once it is known that the request may reach an operation."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(given: str) -> str:
    """The client's request id if it sent a usable one, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


class HttpRequest:
    """A request on its way to an operation."""

    __slots__ = ("body", "caller", "headers", "operation", "params", "receive", "request_id", "scope", "seen")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        # The first of several equal headers counts.
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        self.request_id = request_id_of(self.headers.get("x-request-id", ""))
        self.params: dict[str, str] = {}
        """Parameters of the path."""
        self.operation: Any = None
        self.body = b""
        self.caller: Caller | None = None
        """None if the operation needs no key."""
        self.seen: Any = None
        """What metrics record of it."""

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read_body(self, kind: type[BaseModel], *, is_strict: bool = False) -> Any:
        """The JSON body. It is parsed directly, at a tenth of the cost of building a dictionary first. A strict one is
        without values of any JSON type that could not be sent back, such as NaN."""
        if not self.body or self.content_type in DATASET_TYPES:
            raise InvalidInput("body", problems.NO_BODY)
        try:
            if is_strict:
                return kind.model_validate(parse_json(self.body))
            return kind.model_validate_json(self.body, extra="forbid")
        except ValidationError as error:
            raise problems.invalid_input(error) from error
        except ValueError as error:
            raise InvalidInput("body", f"is not valid JSON: {error}") from error

    def read_query(self, kind: type[BaseModel]) -> Any:
        pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        values: dict[str, Any] = dict(pairs)
        for name, field in kind.model_fields.items():
            if (key := field.alias or name) in values and str(field.annotation).startswith("tuple"):
                values[key] = [value for found, value in pairs if found == key]
        try:
            return kind.model_validate(values, extra="ignore")
        except ValidationError as error:
            raise problems.invalid_input(error) from error


class RestApp:
    """The ASGI application: what every request passes, around a FastAPI application with a route for each path."""

    def __init__(
        self, operations: Sequence[ServedOperation], config: GatewayConfig, metrics: GatewayMetrics, access: Access
    ) -> None:
        self.app = routed(operations)
        self.open_paths = open_paths(operations)
        self.config = config
        self.hosts = AllowedHosts(config)
        self.metrics = metrics
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.metrics.observe("rest") as seen:
            request = HttpRequest(scope, receive)
            request.seen, seen.route = seen, "refused"
            bind(request_id=request.request_id)
            id_header = (b"x-request-id", request.request_id.encode("ascii"))

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], id_header]
                    if message["status"] != 500:  # Unexpected errors are counted as INTERNAL, like those of gRPC.
                        seen.code = str(message["status"])
                await send(message)

            try:
                refusal = await self._refuse(request)
            except ConnectionError:
                seen.code = str(CLIENT_CLOSED_REQUEST)
                return
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
                return
            seen.route = "unmatched"
            scope[REQUEST] = request
            await self.app(scope, receive, send_with_id)

    async def _refuse(self, request: HttpRequest) -> Response | None:
        """The refusal of a request that does not reach its operation. Metrics show it as the route `refused`."""
        response, path = self._refuse_browser(request), request.scope["path"]
        if response is not None:
            return response
        try:
            if not self.open_paths.fullmatch(path):
                key = request.headers.get("x-api-key", "")  # as Anthropic's clients send it
                authorization = request.headers.get("authorization", f"Bearer {key}" if key else "")
                request.caller = self.access.authenticate(authorization, request.request_id)
            return await self._read_body(request)
        except PenstockError as error:
            return problems.answer_to(path, error)

    def _refuse_browser(self, request: HttpRequest) -> Response | None:
        """Refuse what a browser sends for another site.

        A page whose name was pointed at this gateway's address (DNS rebinding) sends a Host that is not the gateway's.
        A page of another site sends its own Origin. Programs send neither."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.hosts.allow(host):
            detail = f"this gateway is not {host[:80]!r}; add the name to gateway.allowed_hosts if it should be"
            return problems.problem(421, "UNKNOWN_HOST", detail)
        if origin is not None and not self.hosts.allow_origin(origin, host):
            detail = f"pages of {origin[:80]!r} may not call this gateway; see gateway.allowed_hosts"
            return problems.problem(403, "FOREIGN_ORIGIN", detail)
        return None

    async def _read_body(self, request: HttpRequest) -> Response | None:
        """Read the whole body before an operation sees any of it. Returns a refusal if it is too large or too slow.
        Raises ConnectionError if the client leaves."""
        headers, limit = request.headers, self.config.max_body_bytes
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return None
        body, has_more = bytearray(), True
        timeout_s = self.config.limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while has_more and len(body) <= limit:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    body += message.get("body", b"")
                    has_more = message.get("more_body", False)
        except TimeoutError:
            detail = f"the body did not arrive within {timeout_s:g} s; send it again"
            return problems.problem(408, "REQUEST_TIMEOUT", detail, headers={"Connection": "close"})
        if len(body) > limit:
            with contextlib.suppress(TimeoutError):  # most clients read the answer only after they have sent everything
                async with asyncio.timeout(DISCARD_TIMEOUT_S):
                    while has_more:
                        has_more = (await request.receive()).get("more_body", False)
            detail = f"the body is larger than {limit} bytes; split the request"
            return problems.problem(413, "BODY_TOO_LARGE", detail, headers={"Connection": "close"})
        kind = request.content_type
        # A page of another site cannot send a body of these types unasked.
        is_json = kind == "application/json" or (kind.startswith("application/") and "+json" in kind)
        if body and not is_json and kind not in DATASET_TYPES:
            detail = f"send the body as application/json, and a dataset as {' or '.join(DATASET_TYPES)}"
            return problems.problem(415, "UNSUPPORTED_MEDIA_TYPE", detail)
        request.body = bytes(body)
        return None


def routed(operations: Sequence[ServedOperation]) -> FastAPI:
    """A FastAPI application with a route for each path. A path with more literal text comes first, so that
    `{name}:verb` wins over `{name}`."""
    by_path: dict[str, dict[str, ServedOperation]] = {}
    for served in operations:
        if path := served.operation.path:
            by_path.setdefault(path, {})[served.operation.verb] = served
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path in sorted(by_path, key=lambda path: -len(re.sub(r"\{\w+\}", "", path))):
        # A plain route: operations declare what they take, and FastAPI's own parameters take half of a small request.
        route = Route(path, _answering(path, by_path[path]))
        route.methods = set(by_path[path])
        app.router.routes.append(route)
    app.add_exception_handler(HTTPException, _no_route)
    return app


def open_paths(operations: Sequence[ServedOperation]) -> re.Pattern[str]:
    """Matches the paths that need no key."""
    paths = [served.operation.path for served in operations if served.operation.scope is None]
    return re.compile("|".join(re.sub(r"\\{\w+\\}", "[^/]*", re.escape(path)) for path in paths))


def _answering(path: str, verbs: dict[str, ServedOperation]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        found: HttpRequest = request.scope[REQUEST]
        found.params, found.seen.route = request.path_params, path
        served = verbs[request.method]
        try:
            return await (call_operation if served.operation.rpcs else call_http)(served, found)
        except PenstockError as error:
            return problems.answer_to(request.scope["path"], error)
        except Exception:
            logger.exception("%s %s failed", request.method, request.scope["path"])
            return problems.problem(500, PenstockError.reason, "the gateway failed to answer; its log says why")

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 405:
        detail = f"{path} does not take {request.method}; /docs lists the methods of each path"
        return problems.problem(405, "METHOD_NOT_ALLOWED", detail, headers=error.headers)
    return problems.problem(404, "NOT_FOUND", f"there is no {path} here; /docs lists the paths of this gateway")


async def call_http(served: ServedOperation, request: HttpRequest) -> Response:
    """Answer a request of an operation that only REST has."""
    operation = request.operation = served.operation
    if operation.scope is not None:
        check_scope(request.caller, operation)
    bodies = [] if operation.takes is None else [request.read_body(operation.takes, is_strict=True)]
    response: Response = await operation.method(served.owner, request, *bodies)
    return response


async def call_operation(served: ServedOperation, request: HttpRequest) -> Response:
    operation = request.operation = served.operation

    async def read() -> ProtoMessage:
        if operation.read is not None:
            return await operation.read(served.owner, request)
        return read_request(operation, request)

    answer = await served.call(request.caller, read, request.params.get("run", ""))
    if operation.event is not None:
        return event_stream(operation, answer)
    return Response(await _encoded(operation, answer), media_type="application/json")


def read_request(operation: Operation, request: HttpRequest) -> ProtoMessage:
    """The protobuf request of an HTTP request. Its fields come from the path, then from the query or the body."""
    fields = operation.request.DESCRIPTOR.fields_by_name
    path = {
        name: text if fields[name].type == FieldDescriptor.TYPE_STRING else _number(name, text)
        for name, text in request.params.items()
    }
    if operation.takes is None:
        message = operation.request(**path)
    else:
        read = request.read_body if operation.has_body else request.read_query
        message = request_of(operation.request, read(operation.takes), **path)
    if operation.header is not None and (value := request.headers.get(operation.header[0], "")):
        header, name = operation.header
        if header == "idempotency-key" and getattr(message, name) not in ("", value):
            raise InvalidInput(name, "differs from the Idempotency-Key header; send one of them")
        setattr(message, name, value)
    return message


def _number(name: str, text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) < 2**63:
        return int(text)
    raise InvalidInput(name, "must be a positive integer")


async def _encoded(operation: Operation, answer: ProtoMessage) -> bytes:
    assert not isinstance(operation.answer, str)
    if answer.ByteSize() < LARGE_BYTES:
        return _encode(answer, operation.answer)
    return await asyncio.to_thread(_encode, answer, operation.answer)


def _encode(answer: ProtoMessage, record: type[BaseModel]) -> bytes:
    """The answer as JSON, whatever an older gateway has accepted: NaN is null, half of a surrogate pair is `?`."""
    value = to_json(answer, record)
    try:
        return encode_json(value, inf_nan_mode="null")
    except ValueError:
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def event_stream(operation: Operation, items: AsyncIterator[Any]) -> Response:
    """Send `items` as server-sent events. An error ends the stream with an event `problem`."""
    assert operation.event is not None
    name, id_field = operation.event

    async def events() -> AsyncIterator[str]:
        pending: asyncio.Task[Any] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(items))
                await asyncio.wait({pending}, timeout=KEEP_ALIVE_S)
                if not pending.done():
                    yield ": keep-alive\n\n"
                    continue
                item, pending = pending.result(), None
                data = (await _encoded(operation, item)).decode()
                yield f"id: {getattr(item, id_field)}\nevent: {name}\ndata: {data}\n\n"
        except StopAsyncIteration:
            return
        except PenstockError as error:
            yield f"event: problem\ndata: {bytes(problems.from_error(error).body).decode()}\n\n"
        finally:
            if pending is not None:
                pending.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


# ── connections ──

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
