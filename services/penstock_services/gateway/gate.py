"""What stands before every REST route: counts, authenticates and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.logs import bind
from penstock_services.gateway import problems
from penstock_services.gateway.access import CALLER, Access
from penstock_services.gateway.metrics import GatewayMetrics
from penstock_services.gateway.request_metrics import Observation

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics"})
"""Answered without a key: probes, scrapes and the console's files carry no prompts and no weights."""
BODY_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 5.0
SUBMIT_PATH = "/v1/runs/{run}/prompts"
_SUBMISSION = re.compile(r"/v1/runs/(?P<run>[^/]+)/prompts")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Submit = Callable[[str, bytes, str], Awaitable[bytes]]
"""Of a run's name, a body and an idempotency key; answers with JSON."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/console/")


def request_id_of(given: str) -> str:
    """The client's own, where it sent a usable one."""
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


class Gate:
    """ASGI middleware: counts the request, checks its key and its rate, and reads its body up to the limit, in this
    order. The answer carries the request's id.

    A submission is answered here, past the framework's routing, which would cost as much as all the rest of it."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, access: Access, max_body_bytes: int, submit: Submit
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.access = access
        self.max_body_bytes = max_body_bytes
        self.submit = submit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self.metrics.observe("rest") as seen:
            headers = Headers(scope=scope)
            request_id = request_id_of(headers.get("x-request-id", ""))
            bind(request_id=request_id)
            send = _watch(send, seen, request_id)
            answer, body = await self._admit(scope, headers, receive, request_id)
            if answer is not None:
                seen.route = "refused"
            elif scope["method"] == "POST" and (submission := _SUBMISSION.fullmatch(scope["path"])):
                seen.route = SUBMIT_PATH
                answer = await self._submitted(submission["run"], body, headers)
            await (answer or self.app)(scope, _replay(body, receive), send)
            seen.route = getattr(scope.get("route"), "path", seen.route)

    async def _submitted(self, run: str, body: bytes, headers: Headers) -> Response:
        try:
            content = await self.submit(run, body, headers.get("idempotency-key", ""))
        except RequestValidationError as error:
            return problems.from_validation_error(error)
        except PenstockError as error:
            return problems.from_error(error)
        return Response(content, media_type="application/json")

    async def _admit(
        self, scope: Scope, headers: Headers, receive: Receive, request_id: str
    ) -> tuple[Response | None, bytes]:
        """The answer that turns the request away, if any, and its whole body."""
        if not is_open(scope["path"]):
            try:
                caller = self.access.admit(headers.get("authorization", ""))
                CALLER.set(caller.asking(request_id))
            except PenstockError as error:
                return problems.from_error(error), b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body, more = await self._read_body(receive)
        except TimeoutError:
            detail = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            return problems.problem(408, "REQUEST_TIMEOUT", detail, headers={"Connection": "close"}), b""
        if len(body) <= self.max_body_bytes:
            return None, body
        return await self._refuse_body(receive, more), b""

    async def _read_body(self, receive: Receive) -> tuple[bytes, bool]:
        """The body up to the first piece that goes over the limit, and whether more follows."""
        body, more = bytearray(), True
        while more and len(body) <= self.max_body_bytes:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body), more

    async def _refuse_body(self, receive: Receive, more: bool) -> Response:
        """Most clients read the answer only after sending everything, so the rest is discarded for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                while more:
                    more = (await receive()).get("more_body", False)
        detail = f"the body is larger than {self.max_body_bytes} bytes; split the request"
        return problems.problem(413, "BODY_TOO_LARGE", detail, headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body once, then whatever follows it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _watch(send: Send, seen: Observation, request_id: str) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.code = str(message["status"])
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
        await send(message)

    return watched
