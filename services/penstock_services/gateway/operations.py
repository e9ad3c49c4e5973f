"""Guards shared by all handlers: the caller's role, a deadline, the error tree and the audit log.

A handler belongs to one run. It takes a protobuf request and returns a protobuf response, or an iterator of responses,
or raises a PenstockError. It checks the whole request before it makes one atomic call, so nothing is half accepted.
REST routes and gRPC services call it as `handler(caller, request)`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from redis.exceptions import RedisError

from penstock.api_keys import Role
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, PenstockError, Unauthenticated, Unavailable
from penstock.v1 import runs_pb2
from penstock_services.gateway.access import Caller

logger = logging.getLogger(__name__)


class AuditLog:
    """Writes a line of JSON for each call that needs the role admin: who made it, when, and how it ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, caller: Caller, operation: str, request: Any, outcome: str) -> None:
        fields = {field.name: _plain(value) for field, value in request.ListFields()}
        entry = {
            "time": time.time(), "key": caller.name, "role": caller.role, "request_id": caller.request_id,
            "operation": operation, "request": fields, "outcome": outcome,
        }  # fmt: skip
        try:
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            logger.warning("cannot write the audit log %s (%s): %s", self.path, error, json.dumps(entry))


class Guarded(Protocol):
    """An object with operations needs these two attributes."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def audit(self) -> AuditLog: ...


G = TypeVar("G", bound=Guarded)
Q = TypeVar("Q")
A = TypeVar("A")


def operation(
    role: Role, timeout_s: float | None = None, *, keeps_deadline: bool = False
) -> Callable[[Callable[[G, Q], Awaitable[A]]], Callable[[G, Caller, Q], Coroutine[Any, Any, A]]]:
    """Turn a method `(self, request)` into a handler `(self, caller, request)` that checks the caller's role.

    The method is cancelled after `timeout_s`, or by default after the time of two Redis commands. `keeps_deadline` is
    for a method that has a deadline of its own and raises nothing but PenstockErrors."""

    def decorate(method: Callable[[G, Q], Awaitable[A]]) -> Callable[[G, Caller, Q], Coroutine[Any, Any, A]]:
        @wraps(method)
        async def handle(self: G, caller: Caller, request: Q) -> A:
            async def call() -> A:
                if keeps_deadline:
                    return await method(self, request)
                return await bounded(method(self, request), timeout_s or 2 * self.config.redis.timeout_s)

            return await run_guarded(call, caller, role, method.__name__, request, self.audit)

        handle.role = role  # type: ignore[attr-defined]
        return handle

    return decorate


async def find_guarded(find: Callable[[], Awaitable[A]], caller: Caller, handler: Any, run: str, audit: AuditLog) -> A:
    """Await `find`, which looks up the run of a call to `handler`, if the caller has the handler's role.

    A caller with too weak a key does not learn which runs exist. A call that ends here goes into the audit log if it
    needs the role admin; otherwise the handler writes it."""
    role: Role = handler.role
    try:
        caller.check(role, handler.__name__)
        return await find()
    except PenstockError as error:
        if role == "admin":
            audit.write(caller, handler.__name__, runs_pb2.GetRunRequest(run=run), error.reason)
        raise


async def run_guarded(
    call: Callable[[], Awaitable[A]], caller: Caller, role: Role, name: str, request: Any, audit: AuditLog
) -> A:
    """Await `call` if the caller has the role. A call that needs the role admin goes into the audit log either way."""
    if not isinstance(caller, Caller):
        raise Unauthenticated(f"{name} was called without a caller")
    outcome = "OK"
    try:
        caller.check(role, name)
        answer = await call()
        if isinstance(answer, AsyncIterator):
            return cast(A, _while_valid(answer, caller, role, name))
        return answer
    except PenstockError as error:
        outcome = error.reason
        raise
    except BaseException:
        outcome = "FAILED"
        raise
    finally:
        if role == "admin":
            audit.write(caller, name, request, outcome)


async def _while_valid(items: AsyncIterator[Any], caller: Caller, role: Role, name: str) -> AsyncIterator[Any]:
    """Yield the items of a stream until the caller's key is removed."""
    try:
        async for item in items:
            caller.check(role, name)
            yield item
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def bounded(call: Awaitable[A], deadline_s: float) -> A:
    """Await `call`, with errors of Redis and a missed deadline as PenstockErrors."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(f"Redis took longer than {deadline_s:g} s; try again") from error
    except RedisError as error:
        raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
