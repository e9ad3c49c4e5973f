"""The REST interface: the routes of every resource, and the gateway's own health and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from penstock import __version__
from penstock.config.service import GatewayConfig
from penstock.errors import PenstockError, Unavailable
from penstock_services.gateway import problems
from penstock_services.gateway.access import Access
from penstock_services.gateway.allowed_hosts import AllowedHosts
from penstock_services.gateway.api_document import openapi_document
from penstock_services.gateway.api_page.routes import ApiPageRoutes
from penstock_services.gateway.console.routes import ConsoleRoutes
from penstock_services.gateway.datasets import routes as datasets
from penstock_services.gateway.generate import openai_routes
from penstock_services.gateway.metrics.gateway import GatewayMetrics
from penstock_services.gateway.metrics.run import RunSnapshot
from penstock_services.gateway.middleware import (
    AuthenticationMiddleware,
    BodyLimitMiddleware,
    BrowserMiddleware,
    MetricsMiddleware,
)
from penstock_services.gateway.policies import routes as policies
from penstock_services.gateway.prompts import routes as prompts
from penstock_services.gateway.routing import add_routes
from penstock_services.gateway.runs import routes as runs
from penstock_services.gateway.served_runs import READY_TIMEOUT_S, ServedRuns
from penstock_services.gateway.sessions import session_routes, task_routes

logger = logging.getLogger(__name__)
T = TypeVar("T")
KEYS_WARNING = "gateway.keys_file or gateway.api_key_file cannot be used; the gateway's log says why"
"""Probes need no key, so they do not show the path of the file."""


def create_app(served: ServedRuns, config: GatewayConfig, metrics: GatewayMetrics, access: Access) -> FastAPI:
    app = FastAPI(
        title="Penstock", version=__version__, docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json",
        redirect_slashes=False, generate_unique_id_function=lambda route: route.name,
        middleware=[
            Middleware(MetricsMiddleware, metrics=metrics),
            Middleware(BrowserMiddleware, hosts=AllowedHosts(config)),
            Middleware(AuthenticationMiddleware, access=access),
            Middleware(
                BodyLimitMiddleware, max_body_bytes=config.max_body_bytes, timeout_s=config.limits.body_timeout_s
            ),
        ],
    )  # fmt: skip
    app.state.served = served
    for router in (
        prompts.router(),
        policies.router(),
        runs.router(),
        datasets.router(),
        openai_routes.router(),
        session_routes.router(),
        task_routes.router(),
        ServiceRoutes(served, metrics, access).router(),
        ConsoleRoutes().router(),
        ApiPageRoutes().router(),
    ):
        app.include_router(router)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    app.add_exception_handler(PenstockError, problems.on_penstock_error)
    app.add_exception_handler(RequestValidationError, problems.on_validation_error)
    app.add_exception_handler(HTTPException, problems.on_http_error)
    app.add_exception_handler(Exception, problems.on_unexpected_error)
    return app


class ServiceRoutes:
    """Probes and scrapes, which are answered without a key."""

    def __init__(self, served: ServedRuns, metrics: GatewayMetrics, access: Access) -> None:
        self.served = served
        self.metrics = metrics
        self.access = access
        self._check_ready = shared(served.check_ready)
        self._take_snapshot = shared(self._snapshot)

    def router(self) -> APIRouter:
        return add_routes(
            "service",
            ("GET", "/healthz", self.healthz),
            ("GET", "/startupz", self.startupz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.scrape),
        )

    async def healthz(self) -> Response:
        return JSONResponse({"status": "alive"})

    async def startupz(self) -> Response:
        """A gateway that answers has started."""
        return JSONResponse({"status": "started"})

    async def readyz(self) -> Response:
        """Whether the gateway can serve: `state` is `ready`, `draining` while it stops, or `stale` without Redis.
        `warnings` lists what needs an operator but does not stop it from serving."""
        try:
            await self._check_ready()
        except Unavailable as error:
            state = "draining" if self.served.stopping.is_set() else "stale"
            return problems.from_error(error, state=state)
        self.access.refresh()
        warnings = [KEYS_WARNING] if self.access.problems else []
        return JSONResponse({"status": "ready", "state": "ready", "detail": "", "warnings": warnings})

    async def scrape(self) -> Response:
        """Metrics. The gateway's own are there even when Redis does not answer."""
        snapshot = await self._take_snapshot()
        self.access.refresh()
        self.metrics.set_keys(len(self.access.keys), len(self.access.problems))
        return Response(self.metrics.render(snapshot), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _snapshot(self) -> RunSnapshot | None:
        sessions = self.metrics.sessions
        sessions.stat = None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                run = await self.served.find("")
                sessions.traffic, sessions.cached_bytes = run.generation.traffic, run.generation.recorder.cached_bytes
                sessions.stat = await run.tasks.tasks.stat()
                return await RunSnapshot.take(run.stores, run.config)
        except (PenstockError, RedisError, TimeoutError) as error:
            logger.warning("scraped without the run's metrics: %s", error)
            return None


def shared(call: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Awaitable[T]]:
    """A function that awaits `call`. Callers at the same time share one call, so that requests without a key, however
    many there are, use one connection to Redis."""
    running: asyncio.Task[T] | None = None

    async def join() -> T:
        nonlocal running
        if running is None or running.done():
            running = asyncio.create_task(call())
        return await asyncio.shield(running)

    return join
