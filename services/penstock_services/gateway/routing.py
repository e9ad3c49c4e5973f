"""Shared by all REST routes: how routes are added, the run and the caller of a request, and event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.errors import InvalidInput, PenstockError, Unauthenticated
from penstock_services.gateway.access import Caller
from penstock_services.gateway.bodies import StrictRequest
from penstock_services.gateway.problems import problem_fields
from penstock_services.gateway.response_schemas import JSON_ANSWERS, success_of
from penstock_services.gateway.served_run import ServedRun
from penstock_services.gateway.served_runs import ServedRuns

KEEP_ALIVE_S = 10.0
"""Keep-alive interval of an idle event stream: it sends a comment, so that proxies and clients keep it open."""

PageSize = Annotated[int, Query(lt=2**31)]
Endpoint = Callable[..., Awaitable[Response]]
T = TypeVar("T")

PROBLEM = {
    "description": "The error, as an RFC 9457 problem document.",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail", "reason", "field"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string", "description": "One line that says what happened and what to do."},
                    "reason": {"type": "string", "description": "Machine-readable and stable."},
                    "field": {"type": "string", "description": "Path of the wrong field, or empty."},
                    "error": {
                        "type": "object",
                        "description": "The same in the form of OpenAI's API: message, type, param and code.",
                    },
                },
            }
        }
    },
}


def add_routes(tag: str, *routes: tuple[str, str, Endpoint]) -> APIRouter:
    """A router of these routes. The first route that matches wins, so `{name}:verb` must come before `{name}`."""
    router = APIRouter(default_response_class=JSONResponse, tags=[tag], route_class=StrictRoute)
    for method, path, endpoint in routes:
        name = endpoint.__name__
        router.add_api_route(
            path, endpoint, methods=[method], response_model=None,
            response_class=JSONResponse if name in JSON_ANSWERS else Response,
            responses={200: success_of(name), "default": PROBLEM},
        )  # fmt: skip
    return router


class StrictRoute(APIRoute):
    """A route that accepts only JSON bodies that `bodies.parse_json` accepts."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Any:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class RequestRoute(APIRoute):
    """A route whose endpoint takes the plain request. It declares its schema with `openapi_extra`.

    FastAPI resolves no parameters and no dependencies for it, which costs about half the time of a submission."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        return self.endpoint


async def served_runs(request: Request) -> ServedRuns:
    served: ServedRuns = request.app.state.served
    return served


async def find_run(run: str, request: Request) -> ServedRun:
    """The run that a path names."""
    served: ServedRuns = request.app.state.served
    caller, name = await caller_of(request), request.scope["endpoint"].__name__
    return await served.find_for(caller, run, lambda own: own.operation(name))


async def caller_of(request: Request) -> Caller:
    """The caller that the authentication middleware found. Without one no handler is called."""
    caller = request.scope.get("caller")
    if not isinstance(caller, Caller):
        raise Unauthenticated(f"{request.url.path} was called without authentication")
    return caller


Served = Annotated[ServedRuns, Depends(served_runs)]
RunOfPath = Annotated[ServedRun, Depends(find_run)]
Authenticated = Annotated[Caller, Depends(caller_of)]


LATEST = ("latest", "current")
"""Names of the newest version, wherever a version is given."""


def policy_version_of(text: str) -> int | None:
    if text in LATEST:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    raise InvalidInput("policy_version", f"must be a number or latest, not {text!r}")


def event_stream(
    name: str, items: AsyncIterator[T], to_json: Callable[[T], Any], event_id: Callable[[T], str], *,
    in_thread: bool = False,
) -> Response:  # fmt: skip
    """Send `items` as server-sent events. An error ends the stream with an event `problem`.

    Large items are made JSON `in_thread`, so that other requests are answered meanwhile."""

    def to_event(item: T) -> str:
        return f"id: {event_id(item)}\nevent: {name}\ndata: {json.dumps(to_json(item))}\n\n"

    async def events() -> AsyncIterator[str]:
        pending: asyncio.Task[T] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(items))
                await asyncio.wait({pending}, timeout=KEEP_ALIVE_S)
                if not pending.done():
                    yield ": keep-alive\n\n"
                    continue
                item, pending = pending.result(), None
                yield await asyncio.to_thread(to_event, item) if in_thread else to_event(item)
        except StopAsyncIteration:
            return
        except PenstockError as error:
            yield f"event: problem\ndata: {json.dumps(problem_fields(error))}\n\n"
        finally:
            if pending is not None:
                pending.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
