"""OpenAI's and Anthropic's HTTP APIs on a rollout server itself, for routers and gateways of inference.

| path | answers |
|---|---|
| `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` | as the gateway does |
| `/v1/models` | the run, and the version that this server serves |
| `/health` | 200 while the server is ready to serve, 503 otherwise |
| `/metrics` | the metrics of the process, with those of the model server protocol |

Everything but the last two needs a key of the gateway. Sessions are recorded by the gateway only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.api_keys import ROLES, find_key
from penstock.config.explanation import describe
from penstock.errors import InvalidInput, PenstockError, PermissionDenied, Unauthenticated, Unavailable
from penstock.key_files import KeyFile
from penstock.process_endpoint import Readiness
from penstock.protocols.answers import (
    CLIENT_CLOSED_REQUEST,
    Exchange,
    anthropic_fields,
    collect,
    collect_unless_left,
    open_events,
    openai_error,
    renamed,
    retry_advice,
    version_fields,
)
from penstock.protocols.anthropic import CountBody, MessagesBody, MessagesExchange
from penstock.protocols.bodies import SamplingBody
from penstock.protocols.chat import ChatBody, ChatExchange, CompletionBody, CompletionExchange
from penstock.protocols.responses import ResponsesBody, ResponsesExchange
from penstock_rollout.serving.generate_service import GenerateService

ANTHROPIC_PATH = "/v1/messages"


class HttpService:
    """The routes. `readiness` is that of the process."""

    def __init__(
        self, generation: GenerateService, keys: list[KeyFile], registry: CollectorRegistry,
        readiness: Callable[[], Readiness], max_body_bytes: int,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.keys = keys
        self.registry = registry
        self.readiness = readiness
        self.max_body_bytes = max_body_bytes

    def app(self) -> Starlette:
        texts = self.generation.tokenization.token_texts
        exchanges: dict[str, tuple[type[SamplingBody], Callable[[Any], Exchange]]] = {
            "/v1/chat/completions": (ChatBody, lambda body: ChatExchange(body, texts)),
            "/v1/completions": (CompletionBody, lambda body: CompletionExchange(body, texts)),
            "/v1/responses": (ResponsesBody, lambda body: ResponsesExchange(body, texts)),
            ANTHROPIC_PATH: (MessagesBody, MessagesExchange),
        }
        routes = [
            Route(path, self._guarded(partial(self._answer, kind, make)), methods=["POST"])
            for path, (kind, make) in exchanges.items()
        ]
        routes += [
            Route(f"{ANTHROPIC_PATH}/count_tokens", self._guarded(self._count), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models, role="read")),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes)

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]], role: str = "submit"
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the check of the key. Errors have the form of the protocol."""

        async def answer(request: Request) -> Response:
            try:
                self._authenticate(request, role)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except PenstockError as error:
                return _problem(request.url.path, error)

        return answer

    def _authenticate(self, request: Request, role: str) -> None:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = request.headers.get("x-api-key", "")
        for file in self.keys:
            file.refresh()
        key = find_key((key for file in self.keys for key in file.keys), secret.strip())
        if key is None:
            raise Unauthenticated("this server needs an API key of the gateway; send `Authorization: Bearer <key>`")
        if ROLES.index(key.role) < ROLES.index(role):
            raise PermissionDenied(f"the key {key.name} has the role {key.role}, and this needs {role}")
        if request.headers.get("x-penstock-session"):
            raise InvalidInput("X-Penstock-Session", "sessions are recorded by the gateway; call it instead")
        if self.readiness().state != "ready":
            raise Unavailable(f"the server is not ready: {self.readiness().detail}; ask another")

    async def _answer(self, kind: type[SamplingBody], make: Callable[[Any], Exchange], request: Request) -> Response:
        body = await self._body(kind, request)
        exchange = make(body)
        try:
            streams = [self.generation.answer(wanted) for wanted in exchange.requests()]
            if body.stream:
                events: AsyncIterator[str] = await open_events(exchange, streams)
                return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
            choices = await collect_unless_left(streams, request.receive)
        except InvalidInput as error:
            raise renamed(error, exchange) from error
        if choices is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        newest = version_fields(choices)["policy_version"]
        return JSONResponse(exchange.whole(choices), headers={"X-Penstock-Policy-Version": str(newest)})

    async def _count(self, request: Request) -> Response:
        body = await self._body(CountBody, request)
        assert isinstance(body, CountBody)
        [choice] = await collect([self.generation.answer(body.request())])
        return JSONResponse({"input_tokens": choice.num_prompt_tokens})

    async def _body(self, kind: type[SamplingBody], request: Request) -> SamplingBody:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > self.max_body_bytes:
                raise InvalidInput("body", f"is larger than gateway.max_body_bytes, {self.max_body_bytes}; send less")
        try:
            return kind.model_validate_json(bytes(content))
        except ValidationError as error:
            first = error.errors()[0]
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
            message = "unknown key" if first["type"] == "extra_forbidden" else describe([first])
            raise InvalidInput(path or "body", message) from error

    async def _models(self, request: Request) -> Response:
        run, version = self.generation.run, self.generation.engine.policy_version
        fields = {"object": "model", "created": 0, "owned_by": "penstock", "policy_version": version}
        models = [
            {"id": name, "server_ids": [self.generation.server_id], **fields} for name in (run, f"{run}@{version}")
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _health(self, request: Request) -> Response:
        readiness = self.readiness()
        return JSONResponse(asdict(readiness), 200 if readiness.state == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def _problem(path: str, error: PenstockError) -> Response:
    headers = {"Retry-After": "1"} if error.http_status == 503 else retry_advice(error)
    if path.startswith(ANTHROPIC_PATH):
        return JSONResponse(anthropic_fields(error.http_status, str(error)), error.http_status, headers=headers)
    return JSONResponse({"error": openai_error(error)}, error.http_status, headers=headers)
