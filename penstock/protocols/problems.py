"""Errors in the forms of OpenAI's and of Anthropic's APIs."""

from __future__ import annotations

from penstock.errors import PenstockError, PromptTooLong, QueueFull, RateLimited, Unauthenticated
from penstock.protocols.conversation import Json

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {
    PromptTooLong.reason: "context_length_exceeded",
    Unauthenticated.reason: "invalid_api_key",
    RateLimited.reason: "rate_limit_exceeded",
}
"""OpenAI's codes by our reasons, where OpenAI has one. Other errors have the reason in lower case as their code."""
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

RETRY_REASONS = frozenset({RateLimited.reason, QueueFull.reason})
"""Reasons below 500 that pass by themselves."""


def retry_advice(error: PenstockError) -> dict[str, str]:
    """A header that keeps OpenAI's and Anthropic's clients from making the same call again, where that cannot help.
    By themselves they also repeat a 409, which a session that is closed answers for ever."""
    is_final = error.http_status < 500 and error.reason not in RETRY_REASONS
    return {"x-should-retry": "false"} if is_final else {}


def openai_error(error: PenstockError) -> Json:
    return openai_fields(error.http_status, error.reason, str(error), getattr(error, "field", ""))


def openai_fields(status: int, reason: str, detail: str, field: str) -> Json:
    """The member `error` of an answer, in which OpenAI's clients look for the message, the type and the code."""
    return {
        "message": detail,
        "type": _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": field or None,
        "code": _OPENAI_CODES.get(reason, reason.lower()),
    }


def anthropic_fields(status: int, detail: str) -> Json:
    """An error of /v1/messages as a whole. The message begins with the name of the wrong field."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail}}
