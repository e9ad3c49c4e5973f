"""Routes of the API's page. Its files hold no data and need no key; the OpenAPI document and the calls do.

Swagger UI comes from the package fastapi-offline, so that the page loads nothing from other hosts."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from penstock.errors import NotFound
from penstock_services.gateway.routing import add_routes

OWN_FILES = {"index.html": "text/html; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
SWAGGER_FILES = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
_HEADERS = {
    # Swagger UI sets styles of elements, and its style sheet contains images.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ApiPageRoutes:
    def router(self) -> APIRouter:
        return add_routes("service", ("GET", "/docs", self.api_page), ("GET", "/docs/{file}", self.api_file))

    async def api_page(self) -> Response:
        """A page to read this document and to try calls."""
        _swagger_folder()  # without it the page would stay empty
        return await self.api_file("index.html")

    async def api_file(self, file: str) -> Response:
        if file in OWN_FILES:
            own = resources.files("penstock_services.gateway.api_page") / file
            return Response(own.read_bytes(), headers=_HEADERS, media_type=OWN_FILES[file])
        if file in SWAGGER_FILES:
            return Response((_swagger_folder() / file).read_bytes(), headers=_HEADERS, media_type=SWAGGER_FILES[file])
        raise NotFound(f"the API's page has no file {file!r}")


def _swagger_folder() -> Path:
    """The folder of Swagger UI's files. It is found without importing the package, which would change FastAPI."""
    spec = importlib.util.find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise NotFound("the API's page needs the package fastapi-offline: pip install 'penstock[services]'")
    return Path(spec.origin).parent / "static"
