"""The OpenAPI document: FastAPI's, with the scheme by which callers show their key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from penstock_services.gateway.middleware import is_open
from penstock_services.gateway.response_schemas import EVENT_ANSWERS

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


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Build the document once; later calls return the same one."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        components = document.setdefault("components", {})
        components["securitySchemes"] = {"key": KEY_SCHEME}
        _, events = models_json_schema(
            [(model, "serialization") for model in EVENT_ANSWERS.values()], ref_template="#/components/schemas/{model}"
        )
        components["schemas"] = events["$defs"] | components["schemas"]
        document["security"] = [{"key": []}]
        for path, methods in document["paths"].items():
            if is_open(path):
                for operation in methods.values():
                    operation["security"] = []
        app.openapi_schema = document
    return app.openapi_schema
