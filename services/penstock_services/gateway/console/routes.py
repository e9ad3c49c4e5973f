"""Routes of the console's static files. They hold no data of a run and need no key; the calls of the console do."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from penstock.errors import NotFound
from penstock_services.gateway.routing import add_routes

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ConsoleRoutes:
    """Keeps the files in memory: there are few, and they are small."""

    def __init__(self) -> None:
        folder = resources.files("penstock_services.gateway") / "console"
        self.files = {
            entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES
        }

    def router(self) -> APIRouter:
        return add_routes("console", ("GET", "/", self.index), ("GET", "/console/{name}", self.file))

    async def index(self) -> Response:
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        if name not in self.files:
            raise NotFound(f"the console has no file {name!r}")
        kind = _TYPES[name.rpartition(".")[2]]
        charset = "" if kind == "image/svg+xml" else "; charset=utf-8"
        return Response(self.files[name], headers=_HEADERS, media_type=kind + charset)
