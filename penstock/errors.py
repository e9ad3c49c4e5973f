"""All errors that Penstock raises on purpose. Each has one gRPC code and one HTTP status.

PenstockError                INTERNAL             500
├── ConfigError              INVALID_ARGUMENT     400   a config file or an override is wrong
├── InvalidInput             INVALID_ARGUMENT     400   a request is wrong; carries the field's path
│   └── PromptTooLong        INVALID_ARGUMENT     400   the prompt has more tokens than the servers accept
├── NotFound                 NOT_FOUND            404
│   └── ModelNotFound        NOT_FOUND            404   no run or server here has the model that a generate call names
├── Unauthenticated          UNAUTHENTICATED      401
├── PermissionDenied         PERMISSION_DENIED    403   the key's scope does not allow the call
├── RateLimited              RESOURCE_EXHAUSTED   429   the key has exceeded its rate limit
├── Conflict                 FAILED_PRECONDITION  409   the request does not fit the current state
├── Fenced                   FAILED_PRECONDITION  409   a newer learner has taken over
├── QueueFull                RESOURCE_EXHAUSTED   429   the replay queue is at its byte limit
├── PoisonGroup              DATA_LOSS            422   a group cannot be decoded or fails its checks
├── DeadlineExceeded         DEADLINE_EXCEEDED    504   a wait has reached its deadline
├── Unavailable              UNAVAILABLE          503   a component that is needed cannot be reached
├── WeightPushFailed         ABORTED              409   a server refused or failed a weight push
├── DiskFull                 RESOURCE_EXHAUSTED   507   a disk has no space left
├── CheckpointDamaged        DATA_LOSS            500   a file of a checkpoint is missing, truncated or changed
├── TrainingDiverged         ABORTED              500   a loss, a gradient or the weights were not finite
└── ProcessDied              ABORTED              500   a child process ended when it should not have
    ├── RoleDied             ABORTED              500   a rank of a role died or hangs; the role can be restarted
    └── RayDied              ABORTED              500   the Ray that the learner runs on died

A message is one line that says what happened and what to do.
"""

from __future__ import annotations

import re
from typing import Self

MAX_FIELD = 500
"""Longest path of a field in an error, in characters."""


class PenstockError(Exception):
    """Base of all errors. `reason` is for programs and never changes; the message is for people.

    A subclass has its parent's code and status unless it names its own."""

    reason = "INTERNAL"
    grpc_code = "INTERNAL"
    http_status = 500

    def __init_subclass__(cls, grpc_code: str = "", http_status: int = 0, reason: str = "") -> None:
        cls.reason = reason or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
        cls.grpc_code, cls.http_status = grpc_code or cls.grpc_code, http_status or cls.http_status


class ConfigError(PenstockError, grpc_code="INVALID_ARGUMENT", http_status=400, reason="CONFIG_INVALID"): ...


class InvalidInput(PenstockError, grpc_code="INVALID_ARGUMENT", http_status=400):
    """A request field is wrong. `field` is its path, for example `prompts[3].num_samples`. A name that the client chose
    may be part of it, so it is cut and its line breaks are escaped."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field[:MAX_FIELD] if field.isprintable() else repr(field[:MAX_FIELD])[1:-1]
        super().__init__(f"{self.field}: {message}")
        self.message = message

    def under(self, path: str) -> Self:
        """The same error for a field inside `path`. Checks of an inner field do not know the outer path."""
        return type(self)(f"{path}.{self.field}" if self.field else path, self.message)


class PromptTooLong(InvalidInput): ...


class NotFound(PenstockError, grpc_code="NOT_FOUND", http_status=404): ...


class ModelNotFound(NotFound):
    field = "model"


class Unauthenticated(PenstockError, grpc_code="UNAUTHENTICATED", http_status=401): ...


class PermissionDenied(PenstockError, grpc_code="PERMISSION_DENIED", http_status=403): ...


class RateLimited(PenstockError, grpc_code="RESOURCE_EXHAUSTED", http_status=429):
    """`retry_after_s` is the time until the next call is allowed."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Conflict(PenstockError, grpc_code="FAILED_PRECONDITION", http_status=409): ...


class Fenced(PenstockError, grpc_code="FAILED_PRECONDITION", http_status=409): ...


class QueueFull(PenstockError, grpc_code="RESOURCE_EXHAUSTED", http_status=429): ...


class PoisonGroup(PenstockError, grpc_code="DATA_LOSS", http_status=422):
    """A group cannot be trained or made. `kind` is the dead-letter reason: corrupt, schema, shape, non_finite,
    identity or session."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DeadlineExceeded(PenstockError, grpc_code="DEADLINE_EXCEEDED", http_status=504): ...


class Unavailable(PenstockError, grpc_code="UNAVAILABLE", http_status=503): ...


class WeightPushFailed(PenstockError, grpc_code="ABORTED", http_status=409): ...


class DiskFull(PenstockError, grpc_code="RESOURCE_EXHAUSTED", http_status=507): ...


class CheckpointDamaged(PenstockError, grpc_code="DATA_LOSS"): ...


class TrainingDiverged(PenstockError, grpc_code="ABORTED"): ...


class ProcessDied(PenstockError, grpc_code="ABORTED"): ...


class RoleDied(ProcessDied):
    """A rank of a role died. `role` is the name of the role, for example `critic`."""

    def __init__(self, role: str, message: str) -> None:
        super().__init__(message)
        self.role = role


class RayDied(ProcessDied): ...


def first_error(error: BaseException) -> BaseException:
    """The first leaf of an exception group, such as a TaskGroup raises; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def described(error: BaseException) -> str:
    """An error in one line. An error of Python's or of a library is named, because its text alone may be `'x'`."""
    text = first_line_of(error)
    if isinstance(error, PenstockError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


ERRORS_BY_REASON: dict[str, type[PenstockError]] = {
    cls.reason: cls
    for cls in (
        ConfigError, InvalidInput, PromptTooLong, NotFound, ModelNotFound, Unauthenticated, PermissionDenied,
        RateLimited, Conflict, Fenced, QueueFull, DeadlineExceeded, Unavailable, WeightPushFailed, DiskFull,
        CheckpointDamaged, TrainingDiverged, ProcessDied, RayDied,
    )
}  # fmt: skip
"""The errors that a process rebuilds from what a peer reported."""


def error_from_reason(reason: str, message: str, field: str = "", retry_after_s: float = 1.0) -> PenstockError | None:
    """Rebuild the error that a peer reported, over REST or gRPC, as the class that it raised.

    Returns None for a reason that is not known here, which a newer peer may send."""
    kind = ERRORS_BY_REASON.get(reason)
    if kind is None:
        return None
    if issubclass(kind, InvalidInput):
        return kind(field, message.removeprefix(f"{field}: "))
    return kind(message, retry_after_s) if issubclass(kind, RateLimited) else kind(message)


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def named(error: BaseException) -> str:
    """An error of a library or of a user's code in one line, with its type."""
    return one_line(f"{type(error).__name__}: {error}")


def first_line_of(error: BaseException) -> str:
    """The first line of a library's message. Our own messages are one line, and some libraries' are many."""
    return str(error).strip().partition("\n")[0]
