"""The listener of a rollout server for the learner and the gateway. Every call must carry the cluster key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from penstock.errors import ConfigError
from penstock.weights.cluster_key import ClusterKey

MAX_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the manifests of models with many thousand tensors."""
WINDOW_BYTES = 2**20
"""What a caller may send before the server has read it. So manifests do not wait for round trips."""


def make_listener(key: ClusterKey) -> grpc.aio.Server:
    """Return a gRPC server that checks the key of each call before it parses the call's message."""
    return grpc.aio.server(
        interceptors=[_KeyCheck(key)],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.max_ping_strikes", 0),  # the learner pings often to notice a server that is unreachable
            # gRPC would find the window by a ping with almost every call, which its callers answer: with 1,000
            # servers that costs the gateway a tenth of a generate call.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ],
    )


class _KeyCheck(grpc.aio.ServerInterceptor):
    def __init__(self, key: ClusterKey) -> None:
        self.key = key

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        try:
            has_key = self.key.is_in(handler_call_details.invocation_metadata or ())
        except ConfigError as error:
            return _refusal(grpc.StatusCode.UNAVAILABLE, str(error))
        if has_key:
            return await continuation(handler_call_details)
        return _refusal(
            grpc.StatusCode.UNAUTHENTICATED,
            "wrong or missing cluster key; set weights.cluster_key_file to the same key in every process",
        )


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    """A handler that refuses a call of any kind. It has no deserializer, so the message stays unparsed."""

    async def refuse(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, details)

    return grpc.unary_unary_rpc_method_handler(refuse)
