"""The gRPC interface: the services of proto/penstock/v1 over the same handlers as REST.

A PenstockError becomes its canonical code, with `reason` (and `field`, for a wrong field) in the trailing metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from penstock.config.service import GatewayConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.v1 import groups_pb2, policies_pb2, prompts_pb2, runs_pb2
from penstock_services.gateway.access import check_authorization
from penstock_services.gateway.handlers import Handlers
from penstock_services.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Message]]


def create_rpc_server(
    handlers: Handlers, config: GatewayConfig, metrics: GatewayMetrics, api_key: str = ""
) -> grpc.aio.Server:
    """A server without a port yet. Two of them never share one: a port in use is an error."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", config.max_body_bytes), ("grpc.so_reuseport", 0)]
    )
    server.add_generic_rpc_handlers(Servicers(handlers, metrics, api_key).generic_handlers())
    return server


class Servicers:
    """PromptService, GroupService, PolicyService and RunService."""

    def __init__(self, handlers: Handlers, metrics: GatewayMetrics, api_key: str) -> None:
        self.handlers = handlers
        self.metrics = metrics
        self.api_key = api_key

    def generic_handlers(self) -> list[grpc.GenericRpcHandler]:
        h = self.handlers
        services: dict[str, dict[str, tuple[Handler, type[Message]]]] = {
            "penstock.v1.PromptService": {
                "SubmitPrompts": (h.submit_prompts, prompts_pb2.SubmitPromptsRequest),
                "GetPrompt": (h.get_prompt, prompts_pb2.GetPromptRequest),
            },
            "penstock.v1.GroupService": {
                "GetGroup": (h.get_group, groups_pb2.GetGroupRequest),
            },
            "penstock.v1.PolicyService": {
                "ListPolicies": (h.list_policies, policies_pb2.ListPoliciesRequest),
                "GetPolicy": (h.get_policy, policies_pb2.GetPolicyRequest),
            },
            "penstock.v1.RunService": {
                "GetRun": (h.get_run, runs_pb2.GetRunRequest),
                "ListServers": (h.list_servers, runs_pb2.ListServersRequest),
                "CreateEvaluation": (h.create_evaluation, runs_pb2.CreateEvaluationRequest),
                "GetEvaluation": (h.get_evaluation, runs_pb2.GetEvaluationRequest),
            },
        }
        return [
            grpc.method_handlers_generic_handler(
                service,
                {name: self._method(f"/{service}/{name}", *target) for name, target in methods.items()},
            )
            for service, methods in services.items()
        ]

    def _method(self, route: str, handler: Handler, request_type: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
        async def behaviour(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
            with self.metrics.observe("grpc") as seen:
                seen.route = route
                try:
                    check_authorization(_authorization(context), self.api_key)
                    response = await handler(request)
                except PenstockError as error:
                    failure = error
                except Exception:
                    logger.exception("%s failed", route)
                    failure = PenstockError("the gateway failed to answer; its log says why")
                else:
                    seen.code = "OK"
                    return response
                seen.code = failure.grpc_code
            return await _abort(context, failure)

        return grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=request_type.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )


def _authorization(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            return str(value)
    return ""


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PenstockError) -> Message:
    trailing = [("reason", error.reason)]
    if isinstance(error, InvalidInput):
        trailing.append(("field", error.field))
    await context.abort(grpc.StatusCode[error.grpc_code], str(error), tuple(trailing))
    raise AssertionError("abort always raises")
