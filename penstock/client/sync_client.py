"""The client for scripts and notebooks: the methods of PenstockClient, without await.

Each one runs a coroutine of PenstockClient over a synchronous transport, so that it never suspends and needs no event
loop. Threads may share a client.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from penstock.api.records import Result
from penstock.client.address import GatewayAddress
from penstock.client.client import PenstockClient, needs_authorities

P = ParamSpec("P")
T = TypeVar("T")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a call of the synchronous client suspended")


def _blocking(
    method: Callable[Concatenate[PenstockClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncPenstockClient, P], T]:
    @functools.wraps(method)
    def call(self: SyncPenstockClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(method(self._client, *args, **kwargs))

    return call


class _BlockingTransport(httpx.AsyncBaseTransport):
    """A synchronous transport for httpx.AsyncClient."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self.transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = self.transport.handle_request(request)
        if not isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _BlockingStream(response.stream)
        return response

    async def aclose(self) -> None:
        self.transport.close()


class _BlockingStream(httpx.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self.stream:
            yield data

    async def aclose(self) -> None:
        self.stream.close()


class _BlockingClient(PenstockClient):
    async def _sleep(self, pause_s: float) -> None:
        sleep(pause_s)  # noqa: ASYNC251  (it must not suspend)


class SyncPenstockClient:
    """Calls a gateway about one run, with the options of PenstockClient. Use it as a context manager, or close it
    yourself. `transport` replaces httpx's synchronous transport."""

    def __init__(
        self, url: str, *, tls: ssl.SSLContext | None = None, transport: httpx.BaseTransport | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.verify = tls or needs_authorities(url)
        """What certificates are verified with, as httpx takes it."""
        blocking = _BlockingTransport(transport or httpx.HTTPTransport(verify=self.verify, trust_env=False))
        self._client = _BlockingClient(url, transport=blocking, **options)
        self.address = self._client.address

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "", **options: Any) -> Self:
        """Connect to the gateway of a run on this machine: see PenstockClient.from_run_dir."""
        return cls(**asdict(GatewayAddress.from_run_dir(folder, api_key)), **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(
        self, cursor: str = "", prompt_ids: Sequence[int] = (), *, with_groups: bool = False
    ) -> Iterator[Result]:
        """Yield every prompt that finishes, without end: see PenstockClient.results."""
        results: Any = self._client.results(cursor, prompt_ids, with_groups=with_groups)
        try:
            while True:
                yield _run(anext(results))
        finally:
            _run(results.aclose())

    close = _blocking(PenstockClient.aclose)
    submit = _blocking(PenstockClient.submit)
    prompts = _blocking(PenstockClient.prompts)
    get_prompt = _blocking(PenstockClient.get_prompt)
    cancel = _blocking(PenstockClient.cancel)
    wait_for_prompt = _blocking(PenstockClient.wait_for_prompt)
    groups = _blocking(PenstockClient.groups)
    get_group = _blocking(PenstockClient.get_group)
    samples = _blocking(PenstockClient.samples)
    create_evaluation = _blocking(PenstockClient.create_evaluation)
    get_evaluation = _blocking(PenstockClient.get_evaluation)
    wait_for_evaluation = _blocking(PenstockClient.wait_for_evaluation)
    policies = _blocking(PenstockClient.policies)
    policy = _blocking(PenstockClient.policy)
    wait_for_policy = _blocking(PenstockClient.wait_for_policy)
    compare_policies = _blocking(PenstockClient.compare_policies)
    promote_policy = _blocking(PenstockClient.promote_policy)
    rewind_policy = _blocking(PenstockClient.rewind_policy)
    release_policy = _blocking(PenstockClient.release_policy)
    retire_policy = _blocking(PenstockClient.retire_policy)
    pin_policy = _blocking(PenstockClient.pin_policy)
    unpin_policy = _blocking(PenstockClient.unpin_policy)
    submit_tasks = _blocking(PenstockClient.submit_tasks)
    get_task = _blocking(PenstockClient.get_task)
    lease_tasks = _blocking(PenstockClient.lease_tasks)
    heartbeat_tasks = _blocking(PenstockClient.heartbeat_tasks)
    return_task = _blocking(PenstockClient.return_task)
    sessions = _blocking(PenstockClient.sessions)
    get_session = _blocking(PenstockClient.get_session)
    reward_session = _blocking(PenstockClient.reward_session)
    runs = _blocking(PenstockClient.runs)
    get_run = _blocking(PenstockClient.get_run)
    pause_run = _blocking(PenstockClient.pause_run)
    resume_run = _blocking(PenstockClient.resume_run)
    stop_run = _blocking(PenstockClient.stop_run)
    metrics = _blocking(PenstockClient.metrics)
    servers = _blocking(PenstockClient.servers)
    drain_server = _blocking(PenstockClient.drain_server)
    undrain_server = _blocking(PenstockClient.undrain_server)
