"""What the routes of every resource share: how they are added, path parts, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.errors import InvalidInput, PenstockError
from penstock_services.gateway.problems import problem_fields

CONFIGURED_RUN = "-"
"""Stands in a path for the one run that the gateway serves; no run can have this name."""
KEEP_ALIVE_S = 10.0
"""So often a stream without events sends a comment: proxies and clients see that it lives."""

PageSize = Annotated[int, Query(lt=2**31)]
Endpoint = Callable[..., Awaitable[Response]]
T = TypeVar("T")

PROBLEM = {
    "description": "What went wrong, as RFC 9457 has it.",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail", "reason", "field"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string", "description": "One line: what happened, then what to do."},
                    "reason": {"type": "string", "description": "Machine-readable and stable."},
                    "field": {"type": "string", "description": "Path of the field that is wrong, or empty."},
                },
            }
        }
    },
}


def add_routes(tag: str, *routes: tuple[str, str, Endpoint]) -> APIRouter:
    """Earlier routes win: those with a `:verb` come before the one whose last part would take it in."""
    router = APIRouter(default_response_class=JSONResponse, tags=[tag])
    for method, path, endpoint in routes:
        router.add_api_route(path, endpoint, methods=[method], response_model=None, responses={"default": PROBLEM})
    return router


def run_name(name: str) -> str:
    return "" if name == CONFIGURED_RUN else name


def policy_version_of(text: str) -> int | None:
    if text == "latest":
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    raise InvalidInput("policy_version", f"must be a number or latest, not {text!r}")


def event_stream(
    name: str, items: AsyncIterator[T], to_json: Callable[[T], Any], event_id: Callable[[T], str]
) -> Response:
    """Server-sent events. An error that comes later is an event `problem`, the last one."""

    async def events() -> AsyncIterator[str]:
        pending: asyncio.Task[T] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(items))
                await asyncio.wait({pending}, timeout=KEEP_ALIVE_S)
                if not pending.done():
                    yield ": still here\n\n"
                    continue
                item, pending = pending.result(), None
                yield f"id: {event_id(item)}\nevent: {name}\ndata: {json.dumps(to_json(item))}\n\n"
        except StopAsyncIteration:
            return
        except PenstockError as error:
            yield f"event: problem\ndata: {json.dumps(problem_fields(error))}\n\n"
        finally:
            if pending is not None:
                pending.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
