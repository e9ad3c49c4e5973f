"""The REST interface: FastAPI routes over the handlers, behind a gate that counts, authenticates and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, Path, Query
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.config.service import GatewayConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.v1 import groups_pb2, policies_pb2, prompts_pb2, runs_pb2
from penstock_services.gateway import bodies, problems
from penstock_services.gateway.access import check_authorization
from penstock_services.gateway.handlers import READY_TIMEOUT_S, Handlers
from penstock_services.gateway.metrics import GatewayMetrics, Observation, RunSnapshot

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Answered without a key: probes and scrapes carry no prompts and no weights."""
BODY_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 5.0
CONFIGURED_RUN = "-"
"""Stands in a path for the one run that the gateway serves; no run can have this name."""

PromptId = Annotated[int, Path(ge=1, lt=2**63)]


def create_app(handlers: Handlers, config: GatewayConfig, metrics: GatewayMetrics, api_key: str = "") -> FastAPI:
    app = FastAPI(
        title="Penstock", version=__version__, docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json",
        redirect_slashes=False,
    )  # fmt: skip
    app.include_router(Routes(handlers, metrics).router())
    app.add_exception_handler(PenstockError, problems.on_penstock_error)
    app.add_exception_handler(RequestValidationError, problems.on_validation_error)
    app.add_exception_handler(HTTPException, problems.on_http_error)
    app.add_exception_handler(Exception, problems.on_unexpected_error)
    app.add_middleware(Gate, metrics=metrics, api_key=api_key, max_body_bytes=config.max_body_bytes)
    return app


class Routes:
    """One method a route: JSON in, the handler's answer as JSON out."""

    def __init__(self, handlers: Handlers, metrics: GatewayMetrics) -> None:
        self.handlers = handlers
        self.metrics = metrics

    def router(self) -> APIRouter:
        router = APIRouter(default_response_class=JSONResponse)
        run = "/v1/runs/{run}"
        for method, path, endpoint in (
            ("POST", f"{run}/prompts", self.submit_prompts),
            ("GET", f"{run}/prompts/{{prompt_id}}", self.get_prompt),
            ("GET", f"{run}/groups/{{prompt_id}}", self.get_group),
            ("GET", f"{run}/policies", self.list_policies),
            ("GET", f"{run}/policies/{{policy_version}}", self.get_policy),
            ("GET", run, self.get_run),
            ("GET", f"{run}/servers", self.list_servers),
            ("POST", f"{run}/evaluations", self.create_evaluation),
            ("GET", f"{run}/evaluations/{{evaluation_id}}", self.get_evaluation),
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.scrape),
        ):
            router.add_api_route(path, endpoint, methods=[method], response_model=None)
        return router

    async def submit_prompts(
        self, run: str, body: bodies.SubmitPromptsBody, idempotency_key: Annotated[str, Header()] = ""
    ) -> Response:
        request = body.to_proto(_run(run), idempotency_key)
        return JSONResponse(bodies.submission_to_json(await self.handlers.submit_prompts(request)))

    async def get_prompt(self, run: str, prompt_id: PromptId) -> Response:
        request = prompts_pb2.GetPromptRequest(run=_run(run), prompt_id=prompt_id)
        return JSONResponse(bodies.prompt_record_to_json(await self.handlers.get_prompt(request)))

    async def get_group(self, run: str, prompt_id: PromptId) -> Response:
        request = groups_pb2.GetGroupRequest(run=_run(run), prompt_id=prompt_id)
        return JSONResponse(bodies.group_to_json(await self.handlers.get_group(request)))

    async def list_policies(
        self, run: str, page_size: Annotated[int, Query(lt=2**31)] = 0, page_token: str = ""
    ) -> Response:
        request = policies_pb2.ListPoliciesRequest(run=_run(run), page_size=max(page_size, -1), page_token=page_token)
        return JSONResponse(bodies.policies_to_json(await self.handlers.list_policies(request)))

    async def get_policy(self, run: str, policy_version: str) -> Response:
        request = policies_pb2.GetPolicyRequest(run=_run(run), policy_version=_policy_version(policy_version))
        return JSONResponse(bodies.policy_to_json(await self.handlers.get_policy(request)))

    async def get_run(self, run: str) -> Response:
        return JSONResponse(bodies.run_to_json(await self.handlers.get_run(runs_pb2.GetRunRequest(run=_run(run)))))

    async def list_servers(self, run: str) -> Response:
        request = runs_pb2.ListServersRequest(run=_run(run))
        return JSONResponse(bodies.servers_to_json(await self.handlers.list_servers(request)))

    async def create_evaluation(self, run: str, body: bodies.CreateEvaluationBody) -> Response:
        evaluation = await self.handlers.create_evaluation(body.to_proto(_run(run)))
        return JSONResponse(bodies.evaluation_to_json(evaluation))

    async def get_evaluation(self, run: str, evaluation_id: str) -> Response:
        request = runs_pb2.GetEvaluationRequest(run=_run(run), evaluation_id=evaluation_id)
        return JSONResponse(bodies.evaluation_to_json(await self.handlers.get_evaluation(request)))

    async def healthz(self) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self) -> Response:
        await self.handlers.check_ready()
        return JSONResponse({"status": "ready"})

    async def scrape(self) -> Response:
        """The gateway's own series are there even when Redis is not."""
        snapshot = None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                snapshot = await RunSnapshot.take(self.handlers.queue, self.handlers.fleet, self.handlers.heartbeats)
        except (PenstockError, RedisError, TimeoutError) as error:
            logger.warning("scraped without the run's series: %s", error)
        return Response(self.metrics.render(snapshot), media_type="text/plain; version=0.0.4; charset=utf-8")


class Gate:
    """ASGI middleware: counts the request, checks its key, and reads its body up to the limit, in this order."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, api_key: str, max_body_bytes: int) -> None:
        self.app = app
        self.metrics = metrics
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self.metrics.observe("rest") as seen:
            refusal, body = await self._admit(scope, receive)
            if refusal is not None:
                seen.route = "refused"
            await (refusal or self.app)(scope, _replay(body, receive), _watch(send, seen))
            seen.route = getattr(scope.get("route"), "path", seen.route)

    async def _admit(self, scope: Scope, receive: Receive) -> tuple[Response | None, bytes]:
        """The answer that turns the request away, if any, and its whole body."""
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS:
            try:
                check_authorization(headers.get("authorization", ""), self.api_key)
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


def _watch(send: Send, seen: Observation) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.code = str(message["status"])
        await send(message)

    return watched


def _run(name: str) -> str:
    return "" if name == CONFIGURED_RUN else name


def _policy_version(text: str) -> int | None:
    if text == "latest":
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    raise InvalidInput("policy_version", f"must be a number or latest, not {text!r}")
