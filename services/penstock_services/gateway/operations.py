"""Operations of the gateway: each is one declaration, the decorator of the method that answers it.

`operation` declares what REST and gRPC both serve: `PromptHandlers.get_prompt` answers PromptService.GetPrompt. Its
method takes a protobuf request and returns a response or an iterator of responses. It checks the whole request before
it makes one atomic call, so nothing is half accepted. `http_operation` declares what only REST serves, such as OpenAI's
and Anthropic's protocols.

REST routes, gRPC methods, the check of the caller's key, the audit log, the OpenAPI document and the table in
docs/gateway.md are derived from the declarations.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel
from redis.exceptions import RedisError

from penstock.api_keys import Scope
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, NotFound, PenstockError, Unauthenticated, Unavailable
from penstock.replay.queue_types import kind_of
from penstock.store.ownership import Owner
from penstock_services.gateway.access import Caller

logger = logging.getLogger(__name__)
RUN = "/v1/runs/{run}"
"""Path of the run, below which its resources are."""
IDEMPOTENCY_KEY = ("idempotency-key", "idempotency_key")
"""The header, and the field of the request."""
OWN_RUN = ("", "-")
"""Names that stand for the gateway's run in a path or a request. No run can have them."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True)
class Operation:
    """What everything that is derived knows of an operation."""

    method: Callable[..., Awaitable[Any]]
    verb: str
    path: str
    scope: Scope | None
    """The weakest scope of a key that may call it. None if it needs no key."""
    answer: type[BaseModel] | str
    """The record that REST answers with, or the media type of a file."""
    rpcs: tuple[MethodDescriptor, ...] = ()
    """Its gRPC methods. Without any, the method takes and returns HTTP."""
    takes: type[BaseModel] | None = None
    """The query parameters of GET and DELETE, or the body of POST and PUT."""
    header: tuple[str, str] | None = None
    """A header, and the field of the request that has its value."""
    read: Callable[..., Awaitable[Message]] | None = None
    """Reads the request from HTTP instead of `takes`."""
    event: tuple[str, str] | None = None
    """For a stream of answers: the name of its server-sent events, and the field with their ids."""
    timeout_s: float | None = None
    """The method is cancelled after this time; by default after its handlers' time."""
    keeps_deadline: bool = False
    """The method has a deadline itself, and raises only PenstockErrors."""
    is_documented: bool = True

    @property
    def name(self) -> str:
        return self.method.__name__

    @property
    def has_body(self) -> bool:
        return self.verb in ("POST", "PUT")

    @cached_property
    def takes_caller(self) -> bool:
        return "caller" in signature(self.method).parameters

    @cached_property
    def request(self) -> type[Message]:
        return GetMessageClass(self.rpcs[0].input_type)


def operation(
    verb: str, path: str, scope: Scope, answer: type[BaseModel], further_rpc: str = "", **further: Any
) -> Callable[[F], F]:
    """Declare the method `(self, request)` or `(self, caller, request)` as the operation that answers
    `verb path` and its gRPC method.

    A path without a slash at its beginning is below the run's. `further_rpc` is a second gRPC method of the service,
    and `further` are fields of Operation."""

    def declare(method: F) -> F:
        service = f"penstock.v1.{method.__qualname__.partition('Handlers.')[0]}Service"
        names = [method.__name__.title().replace("_", ""), *filter(None, [further_rpc])]
        rpcs = tuple(descriptor_pool.Default().FindMethodByName(f"{service}.{name}") for name in names)
        where = path if not path or path.startswith("/") else f"{RUN}/{path}"
        return http_operation(verb, where, scope, answer, rpcs=rpcs, **further)(method)

    return declare


def http_operation(
    verb: str, path: str, scope: Scope | None, answer: type[BaseModel] | str, **further: Any
) -> Callable[[F], F]:
    """Declare the method `(self, http)`, or `(self, http, body)` if it `takes` one, which returns an HTTP response."""

    def declare(method: F) -> F:
        method.operation = Operation(method, verb, path, scope, answer, **further)  # type: ignore[attr-defined]
        return method

    return declare


def declared_by(owners: Iterable[type]) -> list[Operation]:
    """The operations of these classes, in the order of their declaration."""
    members = (member for owner in owners for member in vars(owner).values())
    return [member.operation for member in members if hasattr(member, "operation")]


def write_audit(path: Path, caller: Caller, operation: str, request: Message | None, run: str, outcome: str) -> None:
    """Write a line of JSON for a call that needs the scope admin: who made it, when, and how it ended."""
    given = [] if request is None else request.ListFields()
    fields = {one.name: value if isinstance(value, str | int | float) else str(value) for one, value in given}
    entry = {
        "time": time.time(), "key": caller.name, "scope": caller.scope, "request_id": caller.request_id,
        "operation": operation, "request": fields if request is not None else {"run": run}, "outcome": outcome,
    }  # fmt: skip
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        logger.warning("cannot write the audit log %s (%s): %s", path, error, json.dumps(entry))


@dataclass
class Handlers:
    """Answers the operations of one gRPC service."""

    config: RunConfig

    @property
    def deadline_s(self) -> float:
        """Longest time of an operation, unless it declares another: as long as two Redis commands may take."""
        return 2 * self.config.redis.timeout_s


@dataclass(frozen=True)
class ServedOperation:
    """An operation and the object whose method answers it."""

    operation: Operation
    owner: Any

    @cached_property
    def _method(self) -> Callable[..., Awaitable[Any]]:
        method: Callable[..., Awaitable[Any]] = getattr(self.owner, self.operation.name)
        return method

    async def call(self, caller: Caller | None, read: Callable[[], Awaitable[Message]], run: str = "") -> Any:
        """Answer a request of `caller`. `read` reads the request, and `run` is the run that its path names.

        The caller's scope is checked first: a caller with too weak a key learns nothing of runs and requests. A call
        that needs the scope admin goes into the audit log, however it ends."""
        operation, request, outcome = self.operation, None, "OK"
        try:
            check_scope(caller, operation)
            self._check_run(run)
            request = await read()
            if not run:
                self._check_run(getattr(request, "run", ""))
            answer = await self._answer(request, caller)
            return while_valid(answer, caller, operation) if isinstance(answer, AsyncIterator) else answer
        except PenstockError as error:
            outcome = error.reason
            raise
        except BaseException:
            outcome = "FAILED"
            raise
        finally:
            if operation.scope == "admin" and caller is not None:
                write_audit(self.owner.config.folder / "audit.jsonl", caller, operation.name, request, run, outcome)

    async def _answer(self, request: Message, caller: Caller | None) -> Any:
        operation = self.operation
        answer = self._method(caller, request) if operation.takes_caller else self._method(request)
        if operation.keeps_deadline:
            return await answer
        return await bounded(answer, operation.timeout_s or self.owner.deadline_s)

    def _check_run(self, run: str) -> None:
        own = self.owner.config.run
        if run != own and run not in OWN_RUN:
            raise NotFound(f"run {run!r} is not served here; this gateway serves {own!r}")


def check_scope(caller: Caller | None, operation: Operation) -> None:
    """Raise Unauthenticated or PermissionDenied unless the caller's key is valid and its scope suffices."""
    if not isinstance(caller, Caller):
        raise Unauthenticated(f"{operation.name} was called without a caller")
    assert operation.scope is not None
    caller.check(operation.scope, operation.name)


async def while_valid(items: AsyncIterator[T], caller: Caller | None, operation: Operation) -> AsyncIterator[T]:
    """Yield the items of a stream until the caller's key is removed."""
    try:
        async for item in items:
            check_scope(caller, operation)
            yield item
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


def body_digest(messages: Iterable[Message]) -> str:
    """Digest of what a request asks for, to which its idempotency key is bound."""
    digest = blake2b(digest_size=16)
    for message in messages:
        data = message.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


async def bounded(call: Awaitable[T], deadline_s: float) -> T:
    """Await `call`, with errors of Redis and a missed deadline as PenstockErrors."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(f"there was no answer within {deadline_s:g} s; try again") from error
    except RedisError as error:
        raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error


def shown_reason(reason: str, owner: Owner) -> str:
    """The reason of a failure, whole for operators and its kind for others: the rest may quote any team's prompts."""
    return reason if owner.sees_all or not reason else kind_of(reason)
