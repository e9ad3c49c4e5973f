"""RFC 9457 problem documents: every error of the REST interface has this form.

A document also has the member `error`, in which OpenAI's clients look for the message, the type and the code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from pydantic import ValidationError
from starlette.responses import JSONResponse

from penstock.config.loading import describe, dotted
from penstock.errors import InvalidInput, PenstockError, QueueFull, RateLimited, Unauthenticated, Unavailable
from penstock.protocols.answers import anthropic_fields, openai_fields, retry_advice

ANTHROPIC_PATH = "/v1/messages"
NO_BODY = "send a JSON object with Content-Type: application/json"
RETRY_AFTER_S = 1
"""Value of `Retry-After` for an error that passes by itself after an unknown time."""


def retry_after_s(error: PenstockError) -> int | None:
    """Whole seconds after which the same call may succeed; None if waiting does not help. Both protocols send it."""
    if isinstance(error, RateLimited):
        return math.ceil(error.retry_after_s)
    return RETRY_AFTER_S if isinstance(error, QueueFull | Unavailable) else None


def problem(
    status: int, reason: str, detail: str, field: str = "", headers: Mapping[str, str] | None = None, **members: str
) -> JSONResponse:
    content = {
        "type": f"urn:penstock:problem:{reason.lower().replace('_', '-')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "reason": reason,
        "field": field,
        "error": openai_fields(status, reason, detail, field),
        **members,
    }
    return JSONResponse(content, status, headers=headers, media_type="application/problem+json")


def raw_problem(status: int, reason: str, detail: str) -> bytes:
    """A whole HTTP response with a problem document, for a connection that is closed after it."""
    response = problem(status, reason, detail, headers={"Connection": "close"})
    head = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode("ascii"))]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def from_error(error: PenstockError, **members: str) -> JSONResponse:
    """The problem of an error. `members` are further members of the document."""
    headers = retry_advice(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if (wait_s := retry_after_s(error)) is not None:
        headers["Retry-After"] = str(wait_s)
    return problem(error.http_status, error.reason, str(error), getattr(error, "field", ""), headers, **members)


def answer_to(path: str, error: PenstockError) -> JSONResponse:
    """The answer to a failed request: a problem document, or Anthropic's form where its clients ask."""
    response = from_error(error)
    if not path.startswith(ANTHROPIC_PATH):
        return response
    fields = anthropic_fields(error.http_status, str(error))
    further = {"reason": error.reason, "field": getattr(error, "field", "")}
    kept = ("retry-after", "www-authenticate", "x-should-retry")
    headers = {name: value for name, value in response.headers.items() if name in kept}
    return JSONResponse(fields | further, error.http_status, headers=headers)


def invalid_input(error: ValidationError) -> InvalidInput:
    """The error of a body or a query that does not fit its model. It names the first wrong field."""
    first, *others = error.errors(include_url=False)
    field, message = dotted([str(part) for part in first["loc"]]), describe([first])
    if first["type"] == "json_invalid":
        field, message = "body", f"is not valid JSON: {first['ctx']['error']}"
    elif first["type"] == "extra_forbidden":
        message = "unknown key"
    elif not first["loc"]:
        field, message = "body", NO_BODY
    return InvalidInput(field, message + (f" (and {len(others)} more)" if others else ""))
