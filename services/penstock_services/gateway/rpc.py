"""The gRPC interface: the services of proto/penstock/v1 over the same handlers as REST, with health and reflection.

A PenstockError becomes its canonical code, with `reason` (and `field`, for a wrong field) in the trailing metadata.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.config.service import GatewayConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.logs import bind
from penstock.v1 import datasets_pb2, generate_pb2, groups_pb2, policies_pb2, prompts_pb2, runs_pb2
from penstock_services.gateway.access import CALLER, Access
from penstock_services.gateway.gate import request_id_of
from penstock_services.gateway.handlers import Handlers
from penstock_services.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[Any], Awaitable[Message]]


@dataclass(frozen=True)
class Answer:
    """One response."""

    handler: Unary
    request: type[Message]


@dataclass(frozen=True)
class Answers:
    """A stream of responses; the handler is awaited for it, which is where a wrong request fails."""

    handler: Callable[[Any], Awaitable[AsyncIterator[Message]]]
    request: type[Message]


@dataclass(frozen=True)
class Exchange:
    """A stream of requests, each answered."""

    handler: Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
    request: type[Message]


Method = Answer | Answers | Exchange


def services_of(h: Handlers) -> dict[str, dict[str, Method]]:
    return {
        "penstock.v1.PromptService": {
            "SubmitPrompts": Answer(h.prompts.submit_prompts, prompts_pb2.SubmitPromptsRequest),
            "StreamPrompts": Exchange(h.prompts.stream_prompts, prompts_pb2.SubmitPromptsRequest),
            "GetPrompt": Answer(h.prompts.get_prompt, prompts_pb2.GetPromptRequest),
            "ListPrompts": Answer(h.prompts.list_prompts, prompts_pb2.ListPromptsRequest),
            "CancelPrompts": Answer(h.prompts.cancel_prompts, prompts_pb2.CancelPromptsRequest),
            "WaitPrompt": Answer(h.prompts.wait_prompt, prompts_pb2.WaitPromptRequest),
            "WatchResults": Answers(h.prompts.watch_results, prompts_pb2.WatchResultsRequest),
        },
        "penstock.v1.GroupService": {
            "GetGroup": Answer(h.prompts.get_group, groups_pb2.GetGroupRequest),
            "ListGroups": Answer(h.prompts.list_groups, groups_pb2.ListGroupsRequest),
        },
        "penstock.v1.PolicyService": {
            "ListPolicies": Answer(h.policies.list_policies, policies_pb2.ListPoliciesRequest),
            "GetPolicy": Answer(h.policies.get_policy, policies_pb2.GetPolicyRequest),
            "WatchPolicies": Answers(h.policies.watch_policies, policies_pb2.WatchPoliciesRequest),
            "ComparePolicies": Answer(h.policies.compare_policies, policies_pb2.ComparePoliciesRequest),
            "PromotePolicy": Answer(h.policies.promote_policy, policies_pb2.ChangePolicyRequest),
            "RollBackPolicy": Answer(h.policies.roll_back_policy, policies_pb2.ChangePolicyRequest),
            "ReleasePolicy": Answer(h.policies.release_policy, policies_pb2.ReleasePolicyRequest),
            "PinPolicy": Answer(h.policies.pin_policy, policies_pb2.PinPolicyRequest),
            "UnpinPolicy": Answer(h.policies.unpin_policy, policies_pb2.UnpinPolicyRequest),
            "RetirePolicy": Answer(h.policies.retire_policy, policies_pb2.ChangePolicyRequest),
        },
        "penstock.v1.DatasetService": {
            "UploadDataset": Answer(h.datasets.upload_dataset, datasets_pb2.UploadDatasetRequest),
            "GetDataset": Answer(h.datasets.get_dataset, datasets_pb2.GetDatasetRequest),
            "SubmitDataset": Answer(h.datasets.submit_dataset, datasets_pb2.SubmitDatasetRequest),
        },
        "penstock.v1.GenerateService": {
            "Generate": Answers(h.generation.generate, generate_pb2.GenerateRequest),
        },
        "penstock.v1.SessionService": {
            "RewardSession": Answer(h.generation.reward_session, generate_pb2.RewardSessionRequest),
        },
        "penstock.v1.RunService": {
            "GetRun": Answer(h.runs.get_run, runs_pb2.GetRunRequest),
            "CreateRun": Answer(h.runs.create_run, runs_pb2.CreateRunRequest),
            "ListRuns": Answer(h.runs.list_runs, runs_pb2.ListRunsRequest),
            "PauseRun": Answer(h.runs.pause_run, runs_pb2.ChangeRunRequest),
            "ResumeRun": Answer(h.runs.resume_run, runs_pb2.ChangeRunRequest),
            "StopRun": Answer(h.runs.stop_run, runs_pb2.ChangeRunRequest),
            "ListMetrics": Answer(h.runs.list_metrics, runs_pb2.ListMetricsRequest),
            "ListServers": Answer(h.runs.list_servers, runs_pb2.ListServersRequest),
            "DrainServer": Answer(h.runs.drain_server, runs_pb2.ChangeServerRequest),
            "UndrainServer": Answer(h.runs.undrain_server, runs_pb2.ChangeServerRequest),
            "CreateEvaluation": Answer(h.runs.create_evaluation, runs_pb2.CreateEvaluationRequest),
            "GetEvaluation": Answer(h.runs.get_evaluation, runs_pb2.GetEvaluationRequest),
            "ListDeadLetters": Answer(h.runs.list_dead_letters, runs_pb2.ListDeadLettersRequest),
            "RequeueDeadLetter": Answer(h.runs.requeue_dead_letter, runs_pb2.RequeueDeadLetterRequest),
        },
    }


class RpcServer:
    """gRPC's server, and the health that it reports. Without a port yet: two of them never share one."""

    def __init__(self, handlers: Handlers, config: GatewayConfig, metrics: GatewayMetrics, access: Access) -> None:
        self.server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", config.max_body_bytes), ("grpc.so_reuseport", 0)]
        )
        self.health = health.aio.HealthServicer()
        self._services = services_of(handlers)
        self.server.add_generic_rpc_handlers(Servicers(self._services, metrics, access).generic_handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> None:
        await self.server.start()
        for name in ("", *self._services):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Health says so first; then nothing new is taken."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class Servicers:
    """Every service of the gateway, behind the same admission as REST."""

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
        if isinstance(method, Answer):
            return grpc.unary_unary_rpc_method_handler(self._unary(route, method.handler), **coding)
        if isinstance(method, Answers):
            opened = method.handler

            async def stream(request: Any) -> AsyncIterator[Message]:
                async for response in await opened(request):
                    yield response

            return grpc.unary_stream_rpc_method_handler(self._stream(route, stream), **coding)
        return grpc.stream_stream_rpc_method_handler(self._stream(route, method.handler), **coding)

    def _unary(self, route: str, handler: Unary) -> Any:
        async def behaviour(request: Message, context: Context) -> Message:
            with self.metrics.observe("grpc") as seen:
                seen.route = route
                try:
                    self._admit(context)
                    response = await handler(request)
                except Exception as error:
                    failure = _failure(route, error)
                else:
                    seen.code = "OK"
                    return response
                seen.code = failure.grpc_code
            await _abort(context, failure)
            raise AssertionError("abort always raises")

        return behaviour

    def _stream(self, route: str, handler: Callable[[Any], AsyncIterator[Message]]) -> Any:
        async def behaviour(request: Any, context: Context) -> AsyncIterator[Message]:
            with self.metrics.observe("grpc") as seen:
                seen.route, seen.code = route, "CANCELLED"
                try:
                    self._admit(context)
                    await context.send_initial_metadata(())  # a watcher learns that it is heard before anything happens
                    async for response in handler(request):
                        yield response
                except Exception as error:
                    failure = _failure(route, error)
                else:
                    seen.code = "OK"
                    return
                seen.code = failure.grpc_code
            await _abort(context, failure)

        return behaviour

    def _admit(self, context: Context) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        request_id = request_id_of(str(metadata.get("x-request-id", "")))
        context.set_trailing_metadata((("x-request-id", request_id),))
        bind(request_id=request_id)
        caller = self.access.admit(str(metadata.get("authorization", "")))
        CALLER.set(caller.asking(request_id))


def _failure(route: str, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("%s failed", route, exc_info=error)
    return PenstockError("the gateway failed to answer; its log says why")


async def _abort(context: Context, error: PenstockError) -> None:
    trailing = [*(context.trailing_metadata() or ()), ("reason", error.reason)]
    if isinstance(error, InvalidInput):
        trailing.append(("field", error.field))
    await context.abort(grpc.StatusCode[error.grpc_code], str(error), tuple(trailing))
