"""The OpenAPI document, made from the operations, and the static pages: the console, and a page to try the API.

The files of the pages hold no data of a run and need no key; their calls do. Swagger UI comes from the package
fastapi-offline, so that the page loads nothing from other hosts.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.responses import JSONResponse, Response

from penstock import __version__
from penstock.api.records import Problem
from penstock.errors import NotFound
from penstock_services.gateway.operations import Operation, http_operation
from penstock_services.gateway.rest import HttpRequest

KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of `gateway.api_key_file` or `gateway.keys_file`. A gateway on loopback without keys makes "
    "one, in `gateway.key` of the run's folder.",
}
DESCRIPTION = (
    "Prompts, results, policies and runs of Penstock. Errors are RFC 9457 problem documents. `-` in a path is the "
    "gateway's own run."
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_API_HEADERS = _HEADERS | {
    # Swagger UI sets styles of elements, and its style sheet contains images.
    "Content-Security-Policy": _HEADERS["Content-Security-Policy"]
    .replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    .replace("img-src 'self'", "img-src 'self' data:")
}
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")


def api_document(operations: Sequence[Operation]) -> dict[str, Any]:
    shown = [operation for operation in operations if operation.path and operation.is_documented]
    uses: list[tuple[type[BaseModel], JsonSchemaMode]] = [(Problem, "serialization")]
    uses += [(one.takes, "validation") for one in shown if one.takes is not None and one.has_body]
    uses += [(one.answer, "serialization") for one in shown if not isinstance(one.answer, str)]
    schemas, definitions = models_json_schema(list(dict.fromkeys(uses)), ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in shown:
        paths.setdefault(operation.path, {})[operation.verb.lower()] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": {"key": KEY_SCHEME}},
        "security": [{"key": []}],
    }


def _described(operation: Operation, schemas: Any) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": schemas[Problem, "serialization"]}}
    resource = re.match(r"/v1/(?:runs/\{run\}/)?([a-z-]+)", operation.path)
    described: dict[str, Any] = {
        "tags": [resource[1] if resource else "service"],
        "summary": operation.name.replace("_", " ").capitalize(),
        "operationId": operation.name,
        "parameters": _parameters(operation),
        "responses": {
            "200": _success(operation, schemas),
            "default": {"description": "The error, as an RFC 9457 problem document.", "content": problem},
        },
    }
    if operation.method.__doc__:
        described["description"] = " ".join(operation.method.__doc__.split())
    if operation.takes is not None and operation.has_body:
        content = {"application/json": {"schema": schemas[operation.takes, "validation"]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.scope is None:
        described["security"] = []
    return described


def _success(operation: Operation, schemas: Any) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {"description": "Success.", "content": {operation.answer: {"schema": {"type": "string"}}}}
    kind, text = "application/json", "Success."
    if operation.event is not None:
        kind = "text/event-stream"
        text = f"Server-sent events. The data of each is a {operation.answer.__name__} as JSON."
    return {"description": text, "content": {kind: {"schema": schemas[operation.answer, "serialization"]}}}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    kinds = {name: "integer" if name == "prompt_id" else "string" for name in re.findall(r"\{(\w+)\}", operation.path)}
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": kind}} for name, kind in kinds.items()
    ]
    if operation.takes is not None and not operation.has_body:
        schema = operation.takes.model_json_schema()
        required = schema.get("required", ())
        for name, field in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": name in required, "schema": field})
    if operation.header is not None:
        found.append({"name": operation.header[0].title(), "in": "header", "schema": {"type": "string", "default": ""}})
    return found


class PageHandlers:
    """Serves the console and the API's page. Keeps the console's files in memory: there are few, and they are small."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        folder = resources.files("penstock_services.gateway")
        self.files = {
            room: {entry.name: entry.read_bytes() for entry in (folder / room).iterdir() if _kind(entry.name)}
            for room in ("console", "api_page")
        }
        self._document: dict[str, Any] = {}

    @http_operation("GET", "/", None, "text/html")
    async def index(self, _: HttpRequest) -> Response:
        return self._file("console", "index.html", _HEADERS)

    @http_operation("GET", "/console/{name}", None, "*/*")
    async def file(self, http: HttpRequest) -> Response:
        return self._file("console", http.params["name"], _HEADERS)

    @http_operation("GET", "/docs", None, "text/html")
    async def api_page(self, _: HttpRequest) -> Response:
        """A page to read this document and to try calls."""
        _swagger_folder()  # without it the page would stay empty
        return self._file("api_page", "index.html", _API_HEADERS)

    @http_operation("GET", "/docs/{file}", None, "*/*")
    async def api_file(self, http: HttpRequest) -> Response:
        name = http.params["file"]
        if name in SWAGGER_FILES:
            return Response((_swagger_folder() / name).read_bytes(), headers=_API_HEADERS, media_type=_kind(name))
        return self._file("api_page", name, _API_HEADERS)

    @http_operation("GET", "/v1/openapi.json", "read", "application/json", is_documented=False)
    async def document(self, _: HttpRequest) -> Response:
        self._document = self._document or api_document(self.operations)
        return JSONResponse(self._document)

    def _file(self, room: str, name: str, headers: dict[str, str]) -> Response:
        if name not in self.files[room]:
            raise NotFound(f"the {room.replace('_', ' ')} has no file {name!r}")
        return Response(self.files[room][name], headers=headers, media_type=_kind(name))


def _kind(name: str) -> str:
    """The media type of a file; empty if it is not served."""
    kind = _TYPES.get(name.rpartition(".")[2], "")
    return kind if kind in ("", "image/svg+xml") else f"{kind}; charset=utf-8"


def _swagger_folder() -> Path:
    """The folder of Swagger UI's files. It is found without importing the package, which would change FastAPI."""
    spec = importlib.util.find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise NotFound("the API's page needs the package fastapi-offline: pip install 'penstock[services]'")
    return Path(spec.origin).parent / "static"
