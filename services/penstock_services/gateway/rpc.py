"""The gRPC interface: the services of proto/penstock/v1 over the same handlers as REST, with health and reflection.

A PenstockError becomes its canonical code. The trailing metadata has its `reason`, the `field` if one is wrong, and
`retry-after` in seconds if the call may succeed later.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.config.service import GatewayConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.logs import bind
from penstock_services.gateway.access import Access, Caller
from penstock_services.gateway.metrics.gateway import GatewayMetrics
from penstock_services.gateway.middleware import request_id_of
from penstock_services.gateway.problems import retry_after_s
from penstock_services.gateway.rpc_methods import Handler, Method, UnaryStream, UnaryUnary, services_of
from penstock_services.gateway.runs.collection import RunCollection
from penstock_services.gateway.served_runs import ServedRuns

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30.0
KEEP_ALIVE_TIMEOUT_S = 20.0
"""The gateway pings a silent client after the first of these times, and closes the connection if the second one passes
without an answer."""
FASTEST_PING_S = 10.0
"""A client that pings more often than this is disconnected."""
Context = grpc.aio.ServicerContext[Any, Any]


class RpcServer:
    """The gRPC server and the health that it reports. It has no port yet, and never shares one with another process."""

    def __init__(
        self, served: ServedRuns, collection: RunCollection, config: GatewayConfig, metrics: GatewayMetrics,
        access: Access,
    ) -> None:  # fmt: skip
        self.server = grpc.aio.server(options=_options(config))
        self.health = health.aio.HealthServicer()
        self._services = services_of(served, collection)
        self.server.add_generic_rpc_handlers(Servicers(self._services, metrics, access).generic_handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> None:
        await self.server.start()
        for name in ("", *self._services):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING first, then accept no more calls and give those in flight `grace_s`."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class Servicers:
    """Every service of the gateway, behind the same authentication and metrics as REST."""

    def __init__(self, services: dict[str, dict[str, Method]], metrics: GatewayMetrics, access: Access) -> None:
        self.services = services
        self.metrics = metrics
        self.access = access

    def generic_handlers(self) -> list[grpc.GenericRpcHandler]:
        return [
            grpc.method_handlers_generic_handler(
                service, {name: self._method(f"/{service}/{name}", method) for name, method in methods.items()}
            )
            for service, methods in self.services.items()
        ]

    def _method(self, route: str, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        coding: dict[str, Any] = {
            "request_deserializer": method.request.FromString,
            "response_serializer": lambda response: response.SerializeToString(),
        }
        if isinstance(method, UnaryUnary):
            return grpc.unary_unary_rpc_method_handler(self._unary(route, method.handler), **coding)
        if isinstance(method, UnaryStream):
            return grpc.unary_stream_rpc_method_handler(self._stream(route, _opened(method.handler)), **coding)
        return grpc.stream_stream_rpc_method_handler(self._stream(route, _each(method.handler)), **coding)

    def _unary(self, route: str, handler: Handler) -> Any:
        async def behaviour(request: Message, context: Context) -> Message:
            with self.metrics.observe("grpc") as seen:
                seen.route = route
                try:
                    response: Message = await handler(self._authenticate(context), request)
                except Exception as error:
                    failure = _failure(route, error)
                else:
                    seen.code = "OK"
                    return response
                seen.code = failure.grpc_code
            await _abort(context, failure)
            raise AssertionError("abort always raises")

        return behaviour

    def _stream(self, route: str, handler: Callable[[Caller, Any], AsyncIterator[Message]]) -> Any:
        async def behaviour(request: Any, context: Context) -> AsyncIterator[Message]:
            with self.metrics.observe("grpc") as seen:
                seen.route, seen.code = route, "CANCELLED"
                try:
                    caller = self._authenticate(context)
                    await context.send_initial_metadata(())  # The client learns that it is connected before any event.
                    async for response in handler(caller, request):
                        yield response
                except Exception as error:
                    failure = _failure(route, error)
                else:
                    seen.code = "OK"
                    return
                seen.code = failure.grpc_code
            await _abort(context, failure)

        return behaviour

    def _authenticate(self, context: Context) -> Caller:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        request_id = request_id_of(str(metadata.get("x-request-id", "")))
        context.set_trailing_metadata((("x-request-id", request_id),))
        bind(request_id=request_id)
        return self.access.authenticate(str(metadata.get("authorization", "")), request_id)


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


def _opened(handler: Handler) -> Callable[[Caller, Any], AsyncIterator[Message]]:
    async def stream(caller: Caller, request: Any) -> AsyncIterator[Message]:
        async for response in await handler(caller, request):
            yield response

    return stream


def _each(handler: Handler) -> Callable[[Caller, AsyncIterator[Any]], AsyncIterator[Message]]:
    async def stream(caller: Caller, requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        async for request in requests:
            yield await handler(caller, request)

    return stream


def _failure(route: str, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("%s failed", route, exc_info=error)
    return PenstockError("the gateway failed to answer; its log says why")


async def _abort(context: Context, error: PenstockError) -> None:
    trailing = [*(context.trailing_metadata() or ()), ("reason", error.reason)]
    if isinstance(error, InvalidInput):
        trailing.append(("field", error.field))
    if (wait_s := retry_after_s(error)) is not None:
        trailing.append(("retry-after", str(wait_s)))
    await context.abort(grpc.StatusCode[error.grpc_code], str(error), tuple(trailing))
