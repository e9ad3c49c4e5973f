"""The gRPC interface: the methods of proto/penstock/v1 over the same operations as REST, with health and reflection.

`Check` of the health service is answered without a key, because probes have none. Everything else needs one.

A PenstockError becomes its canonical code. The trailing metadata has its `reason`, the `field` if one is wrong, and
`retry-after` in seconds if the call may succeed later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.config.service import GatewayConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.logs import bind
from penstock_services.gateway.access import Access, Caller
from penstock_services.gateway.metrics import GatewayMetrics
from penstock_services.gateway.operations import ServedOperation
from penstock_services.gateway.problems import retry_after_s
from penstock_services.gateway.rest import request_id_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30.0
KEEP_ALIVE_TIMEOUT_S = 20.0
"""The gateway pings a client that is silent for the first time, and closes the connection after the second."""
FASTEST_PING_S = 10.0
"""A client that pings more often than this is disconnected."""
MAX_DETAILS = 1000
"""Longest text of an error in characters. Clients refuse an answer with more than 8 KiB of metadata."""
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
HEALTH_CHECK, HEALTH_WATCH = f"/{health.SERVICE_NAME}/Check", f"/{health.SERVICE_NAME}/Watch"
_HEALTH = health_pb2.HealthCheckResponse.SerializeToString
Context = grpc.aio.ServicerContext[Any, Any]


class RpcServer(grpc.GenericRpcHandler):
    """The gRPC server and the health that it reports: every service of the gateway, behind the same authentication and
    metrics as REST. It has no port yet, and never shares one with another process.

    The key is checked before the request is received: a call without one is refused unread."""

    def __init__(
        self, operations: Sequence[ServedOperation], config: GatewayConfig, metrics: GatewayMetrics, access: Access
    ) -> None:
        self.methods = {
            f"/{rpc.containing_service.full_name}/{rpc.name}": (rpc, served)
            for served in operations
            for rpc in served.operation.rpcs
        }
        self.names = sorted({rpc.containing_service.full_name for rpc, _ in self.methods.values()})
        self.health = health.aio.HealthServicer()
        self.metrics = metrics
        self.access = access
        self.reflection = reflection.aio.ReflectionServicer((*self.names, health.SERVICE_NAME, reflection.SERVICE_NAME))
        self.server = grpc.aio.server(options=_options(config))
        self.server.add_generic_rpc_handlers((self,))

    async def start(self) -> None:
        await self.server.start()
        for name in ("", *self.names):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING first, then accept no more calls and give calls in flight `grace_s`."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        route = handler_call_details.method
        if route == HEALTH_CHECK:
            return grpc.unary_unary_rpc_method_handler(self._of_health(self.health.Check), None, _HEALTH)
        if route not in self.methods and route not in (REFLECTION, HEALTH_WATCH):
            return None
        metadata: dict[str, Any] = dict(handler_call_details.invocation_metadata or ())
        request_id = request_id_of(str(metadata.get("x-request-id", "")))
        try:
            caller = self.access.authenticate(str(metadata.get("authorization", "")), request_id)
        except PenstockError as error:
            return grpc.stream_unary_rpc_method_handler(self._unary(route, request_id, partial(_refuse, error)))
        if route == HEALTH_WATCH:
            return grpc.unary_stream_rpc_method_handler(self._of_health(self.health.Watch), None, _HEALTH)
        if route == REFLECTION:
            return grpc.stream_stream_rpc_method_handler(self._stream(route, request_id, self._reflect))
        return self._method(route, *self.methods[route], caller)

    def _method(
        self, route: str, rpc: MethodDescriptor, served: ServedOperation, caller: Caller
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(data: bytes) -> Any:
            try:
                request: Message | InvalidInput = _parse(served.operation.request, data)
            except InvalidInput as error:
                request = error  # it is raised when the caller may call: others learn nothing of their request

            async def read() -> Message:
                if isinstance(request, InvalidInput):
                    raise request
                return request

            return await served.call(caller, read, getattr(request, "run", ""))

        if not rpc.server_streaming:
            return grpc.unary_unary_rpc_method_handler(self._unary(route, caller.request_id, answer))

        async def opened(data: bytes) -> AsyncIterator[Message]:
            async for response in await answer(data):
                yield response

        async def each(requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
            async for data in requests:
                yield await answer(data)

        if not rpc.client_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(route, caller.request_id, opened))
        return grpc.stream_stream_rpc_method_handler(self._stream(route, caller.request_id, each))

    @contextlib.contextmanager
    def _observed(self, route: str, request_id: str, context: Context) -> Iterator[list[PenstockError]]:
        """Count a call. The error that it raises is put into the list; end the call with its status."""
        failures: list[PenstockError] = []
        with self.metrics.observe("grpc") as seen:
            seen.route, seen.code = route, "CANCELLED"
            context.set_trailing_metadata((("x-request-id", request_id),))
            bind(request_id=request_id)
            try:
                yield failures
                seen.code = "OK"
                return
            except PenstockError as error:
                failures.append(error)
            except Exception:
                logger.exception("%s failed", route)
                failures.append(PenstockError("the gateway failed to answer; its log says why"))
            seen.code = failures[0].grpc_code

    def _of_health(self, method: Callable[[Message, Context], Awaitable[Any]]) -> Any:
        async def behaviour(data: bytes, context: Context) -> Any:
            try:
                request = _parse(health_pb2.HealthCheckRequest, data)
            except InvalidInput as error:
                return await _abort(context, error)
            return await method(request, context)

        return behaviour

    async def _reflect(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        parsed = (_parse(reflection_pb2.ServerReflectionRequest, data) async for data in requests)
        async for response in self.reflection.ServerReflectionInfo(parsed, None):
            yield response

    def _unary(self, route: str, request_id: str, answer: Callable[[Any], Awaitable[Message]]) -> Any:
        async def behaviour(request: Any, context: Context) -> bytes:
            with self._observed(route, request_id, context) as failures:
                response = await answer(request)
                return response.SerializeToString()
            return await _abort(context, failures[0])

        return behaviour

    def _stream(self, route: str, request_id: str, answer: Callable[[Any], AsyncIterator[Message]]) -> Any:
        async def behaviour(request: Any, context: Context) -> AsyncIterator[bytes]:
            with self._observed(route, request_id, context) as failures:
                await context.send_initial_metadata(())  # The client learns that it is connected before any event.
                async for response in answer(request):
                    yield response.SerializeToString()
            if failures:
                await _abort(context, failures[0])

        return behaviour


async def _refuse(error: PenstockError, _: AsyncIterator[bytes]) -> NoReturn:
    raise error


def _parse(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidInput("request", f"is not a {kind.DESCRIPTOR.full_name}") from error


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    limits = config.limits
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(limits.header_timeout_s)),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        ("grpc.keepalive_time_ms", _ms(KEEP_ALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEP_ALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(FASTEST_PING_S)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _ms(FASTEST_PING_S)),
    ]


def _ms(seconds: float) -> int:
    return int(1000 * seconds)


async def _abort(context: Context, error: PenstockError) -> NoReturn:
    trailing = [*(context.trailing_metadata() or ()), ("reason", error.reason)]
    if isinstance(error, InvalidInput):
        trailing.append(("field", ascii(error.field)[1:-1]))
    if (wait_s := retry_after_s(error)) is not None:
        trailing.append(("retry-after", str(wait_s)))
    await context.abort(grpc.StatusCode[error.grpc_code], str(error)[:MAX_DETAILS], tuple(trailing))
    raise AssertionError("abort always raises")
