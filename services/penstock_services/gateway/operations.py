"""What every handler shares: the caller's role, the run's name, a deadline, the error tree, and the audit log.

A handler takes a protobuf request and returns a protobuf response, or an iterator of them, else raises a PenstockError.
Nothing is half-accepted: a request is checked whole before its one atomic call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from penstock.api_keys import Role
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock_services.gateway.access import CALLER, Caller
from penstock_services.gateway.served_runs import ServedRuns

logger = logging.getLogger(__name__)


class AuditLog:
    """A line of JSON for each call that changes the run: who, what, when, and how it ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, caller: Caller, operation: str, request: Any, outcome: str) -> None:
        fields = {field.name: _plain(value) for field, value in request.ListFields()}
        if "config_json" in fields:  # it may hold passwords
            fields = {"run": _named_in(fields["config_json"])}
        entry = {
            "time": time.time(), "key": caller.name, "role": caller.role, "request_id": caller.request_id,
            "operation": operation, "request": fields, "outcome": outcome,
        }  # fmt: skip
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            logger.warning("cannot write the audit log %s (%s): %s", self.path, error, json.dumps(entry))


@dataclass(frozen=True)
class Operating:
    """What the handlers of every run share in one gateway."""

    served: ServedRuns
    audit: AuditLog
    stopping: asyncio.Event
    """Ends streams: a gateway that drains does not wait for its watchers."""


class Handling(Protocol):
    """What the decorator needs of the object whose method it wraps: handlers of one run."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def operating(self) -> Operating: ...


Handler = Callable[[Any, Any], Awaitable[Any]]
H = TypeVar("H", bound=Handler)


def operation(role: Role, timeout_s: float | None = None, *, keeps_deadline: bool = False) -> Callable[[H], H]:
    """Guard a handler, and hand a request for another run to that run's. `timeout_s` is the deadline; without one it is
    that of two Redis commands. A handler that keeps its deadline itself, and the error tree, has none here."""

    def decorate(method: H) -> H:
        name = method.__name__

        @wraps(method)
        async def call(self: Handling, request: Any) -> Any:
            caller = CALLER.get(Caller())
            outcome = "OK"
            try:
                caller.check(role, name)
                deadline_s, asked = 2 * self.config.redis.timeout_s, self
                if getattr(request, "run", "") not in ("", self.config.run):
                    asked = await bounded(self.operating.served.peer_of(self, request.run), deadline_s)
                called = method(asked, request)
                return await (called if keeps_deadline else bounded(called, timeout_s or deadline_s))
            except PenstockError as error:
                outcome = error.reason
                raise
            except BaseException:
                outcome = "FAILED"
                raise
            finally:
                if role == "admin":
                    self.operating.audit.write(caller, name, request, outcome)

        return call  # type: ignore[return-value]

    return decorate


async def bounded(call: Awaitable[Any], deadline_s: float) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(f"Redis took longer than {deadline_s:g} s; try again") from error
    except RedisError as error:
        raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error


def _named_in(config_json: str) -> str:
    try:
        return str(json.loads(config_json)["run"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
