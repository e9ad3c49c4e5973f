"""The gateway's process, which serves REST and gRPC until it is told to stop.

It starts on both ports or fails with one line. On SIGTERM or SIGINT both listeners close at once. Requests in flight
then have STOP_GRACE_S to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import grpc
import uvicorn
from prometheus_client import CollectorRegistry

from penstock.config.run import RunConfig
from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError, Unavailable
from penstock.internal_calls import check_certificates
from penstock.machine import DiskWatch
from penstock.metrics import write_endpoint
from penstock.start_checks import check_redis
from penstock.store.heartbeats import Leaving
from penstock.store.redis_client import check_primary, connect, wait_for_primary
from penstock.tracing import open_tracing
from penstock_services.gateway.access import Access, check_gateway, read_certificates
from penstock_services.gateway.metrics import GatewayMetrics
from penstock_services.gateway.rest import Connections, LimitedProtocol, RestApp
from penstock_services.gateway.rpc import RpcServer
from penstock_services.gateway.run import ServedRun, serve_operations

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
START_TIMEOUT_S = 20.0

Ready = Callable[[str, int, int], None]


async def serve(config: RunConfig, ready: Ready | None = None, stop: asyncio.Event | None = None) -> None:
    """Serve until a signal arrives or `stop` is set.

    Once both ports listen, `gateway.json` in the run's folder has their numbers, and `ready` is called with the host,
    the REST port and the gRPC port."""
    check(config)
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the run's folder {config.folder} cannot be created ({error.strerror}); set run_dir"
        raise ConfigError(text) from error
    access = Access.load(config.gateway, config.folder)
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        client, streams = (
            connect(config.redis, max_connections=config.gateway.limits.max_redis_connections) for _ in range(2)
        )
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(streams.aclose)
        with contextlib.suppress(Unavailable):  # Redis may start later
            await check_primary(client)
        await stack.enter_async_context(Leaving(client, config.run, "gateway").holding(stop))
        tracing = open_tracing(config.tracing, "gateway", config.run)
        stack.callback(tracing.close)
        run = await asyncio.to_thread(ServedRun.create, client, streams, config, tracing)
        stack.push_async_callback(run.close)
        metrics = GatewayMetrics(CollectorRegistry(), config.learner.placement)
        metrics.disk.follow("run_dir", DiskWatch(config.folder, "the run and its uploaded datasets"))
        host = config.gateway.host

        listener = stack.enter_context(_listen(host, config.gateway.port, "gateway.port"))
        rest_port: int = listener.getsockname()[1]
        connections = Connections(config.gateway.limits)
        operations = serve_operations(run, metrics, access)
        rest = _RestServer(RestApp(operations, config.gateway, metrics, access), config.gateway, connections)
        rpc = RpcServer(operations, config.gateway, metrics, access)
        grpc_port = _add_port(rpc.server, config.gateway)

        stack.enter_context(_signals(stop))
        async with asyncio.TaskGroup() as group:
            whole_time = (connections.sweep(), run.sessions.rewards.sweep(run.stopping), wait_for_primary(client))
            until_stop = [group.create_task(each) for each in whole_time]
            serving = group.create_task(rest.serve(sockets=[listener]))
            serving.add_done_callback(lambda _: [task.cancel() for task in until_stop])
            await rpc.start()
            group.create_task(_stop_when(stop, run.stopping, rest, rpc))
            async with asyncio.timeout(START_TIMEOUT_S):
                await rest.listening.wait()
            stack.enter_context(_address_file(config, rest_port, grpc_port))
            logger.info("gateway of run %s: REST %s:%d, gRPC %s:%d", config.run, host, rest_port, host, grpc_port)
            if ready is not None:
                ready(host, rest_port, grpc_port)


def check(config: RunConfig) -> None:
    """Raise ConfigError for anything wrong that can be found before a port is opened."""
    check_gateway(config.gateway)
    check_redis(config.redis)
    check_certificates(config.tls)


class _RestServer(uvicorn.Server):
    """uvicorn without its signal handlers. The process has its own, for both protocols."""

    def __init__(self, app: RestApp, config: GatewayConfig, connections: Connections) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=cast(Any, partial(LimitedProtocol, connections=connections)), ws="none", lifespan="off",
                log_config=None, access_log=False, timeout_graceful_shutdown=int(STOP_GRACE_S),
                timeout_keep_alive=cast(Any, config.limits.keep_alive_s),
                ssl_certfile=config.tls_cert_file, ssl_keyfile=config.tls_key_file,
                ssl_ca_certs=str(config.tls_client_ca_file) if config.tls_client_ca_file else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca_file else ssl.CERT_NONE,
            )
        )  # fmt: skip
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def _stop_when(stop: asyncio.Event, stopping: asyncio.Event, rest: _RestServer, rpc: RpcServer) -> None:
    """Wait until the process is told to stop, without a deadline, then stop both servers and all streams."""
    try:
        await stop.wait()
        logger.info("stopping; requests in flight have %g s", STOP_GRACE_S)
    finally:
        stopping.set()
        rest.should_exit = True
        await rpc.stop(STOP_GRACE_S)


def _listen(host: str, port: int, setting: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"gateway.host {host} is not an address: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        is_used = error.errno == errno.EADDRINUSE
        why, what = ("is in use", "a free one") if is_used else (f"cannot be opened ({error.strerror})", "another")
        raise Unavailable(f"port {port} on {host} {why}; set {setting} to {what} or 0") from error
    return listener


def _add_port(rpc: grpc.aio.Server, config: GatewayConfig) -> int:
    host, port, setting = config.host, config.grpc_port, "gateway.grpc_port"
    if port:
        _listen(host, port, setting).close()  # gRPC's own report of a port in use is a page long, so test it first.
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    tls = None
    if (found := read_certificates(config)) is not None:
        key, certificate, authority = found
        tls = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=authority is not None)
    try:
        bound: int = rpc.add_secure_port(target, tls) if tls else rpc.add_insecure_port(target)
    except RuntimeError as error:
        raise Unavailable(f"port {port} on {host} cannot be opened; set {setting} to a free one or 0") from error
    return bound


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`. Outside the main thread signals cannot be caught, so nothing is done."""
    is_main, loop = threading.current_thread() is threading.main_thread(), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _address_file(config: RunConfig, rest_port: int, grpc_port: int) -> Iterator[None]:
    """Keep `gateway.json` while the gateway listens. A file that a later gateway wrote is not removed."""
    scheme, host = "https" if config.gateway.tls_cert_file else "http", config.gateway.host
    write_endpoint(config.folder, "gateway", host=host, rest_port=rest_port, grpc_port=grpc_port, scheme=scheme)
    path = config.folder / "gateway.json"
    written = path.read_bytes()
    try:
        yield
    finally:
        if path.exists() and path.read_bytes() == written:
            path.unlink()
