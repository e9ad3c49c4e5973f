"""The REST interface: the routes of every resource, and what the gateway says of itself."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from penstock import __version__
from penstock.config.service import GatewayConfig
from penstock.errors import PenstockError
from penstock_services.gateway import problems
from penstock_services.gateway.access import Access
from penstock_services.gateway.console_routes import ConsoleRoutes
from penstock_services.gateway.datasets.routes import DatasetRoutes
from penstock_services.gateway.gate import Gate
from penstock_services.gateway.generate.openai_routes import OpenAIRoutes
from penstock_services.gateway.handlers import READY_TIMEOUT_S, Handlers
from penstock_services.gateway.metrics import GatewayMetrics, RunSnapshot
from penstock_services.gateway.policies.routes import PolicyRoutes
from penstock_services.gateway.prompts.routes import PromptRoutes
from penstock_services.gateway.routing import add_routes
from penstock_services.gateway.runs.routes import RunRoutes

logger = logging.getLogger(__name__)


def create_app(handlers: Handlers, config: GatewayConfig, metrics: GatewayMetrics, access: Access) -> FastAPI:
    app = FastAPI(
        title="Penstock", version=__version__, docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json",
        redirect_slashes=False, generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    prompts = PromptRoutes(handlers.prompts)
    for routes in (
        prompts,
        PolicyRoutes(handlers.policies),
        RunRoutes(handlers.runs),
        DatasetRoutes(handlers.datasets),
        OpenAIRoutes(handlers.generation),
        ServiceRoutes(handlers, metrics),
        ConsoleRoutes(),
    ):
        app.include_router(routes.router())
    app.add_exception_handler(PenstockError, problems.on_penstock_error)
    app.add_exception_handler(RequestValidationError, problems.on_validation_error)
    app.add_exception_handler(HTTPException, problems.on_http_error)
    app.add_exception_handler(Exception, problems.on_unexpected_error)
    app.add_middleware(
        Gate, metrics=metrics, access=access, max_body_bytes=config.max_body_bytes, submit=prompts.submit
    )
    return app


class ServiceRoutes:
    """Probes and scrapes: answered without a key."""

    def __init__(self, handlers: Handlers, metrics: GatewayMetrics) -> None:
        self.handlers = handlers
        self.metrics = metrics

    def router(self) -> APIRouter:
        return add_routes(
            "service",
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.scrape),
        )

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
                handlers = self.handlers
                snapshot = await RunSnapshot.take(
                    handlers.queue, handlers.fleet, handlers.heartbeats, handlers.runs.control
                )
        except (PenstockError, RedisError, TimeoutError) as error:
            logger.warning("scraped without the run's series: %s", error)
        return Response(self.metrics.render(snapshot), media_type="text/plain; version=0.0.4; charset=utf-8")
