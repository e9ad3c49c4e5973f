"""Which handler answers which gRPC method. The run that a request names is found here, before its handler is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from penstock.v1 import (
    datasets_pb2,
    generate_pb2,
    groups_pb2,
    policies_pb2,
    prompts_pb2,
    runs_pb2,
    sessions_pb2,
    tasks_pb2,
)
from penstock_services.gateway.access import Caller
from penstock_services.gateway.served_run import ServedRun
from penstock_services.gateway.served_runs import ServedRuns

Handler = Callable[[Caller, Any], Awaitable[Any]]


@dataclass(frozen=True)
class UnaryUnary:
    """One request, one response."""

    handler: Handler
    request: type[Message]


@dataclass(frozen=True)
class UnaryStream:
    """One request, a stream of responses. The handler returns the stream, or raises if the request is wrong."""

    handler: Handler
    request: type[Message]


@dataclass(frozen=True)
class StreamStream:
    """A stream of requests. The handler answers each with one response."""

    handler: Handler
    request: type[Message]


Method = UnaryUnary | UnaryStream | StreamStream


def services_of(served: ServedRuns) -> dict[str, dict[str, Method]]:
    """The methods of every service by name."""

    def of_run(choose: Callable[[ServedRun], Handler]) -> Handler:
        async def handle(caller: Caller, request: Any) -> Any:
            run = await served.find_for(caller, getattr(request, "run", ""), choose)
            return await choose(run)(caller, request)

        return handle

    def unary(choose: Callable[[ServedRun], Handler], request: type[Message]) -> Method:
        return UnaryUnary(of_run(choose), request)

    def stream(choose: Callable[[ServedRun], Handler], request: type[Message]) -> Method:
        return UnaryStream(of_run(choose), request)

    return {
        "penstock.v1.PromptService": {
            "SubmitPrompts": unary(lambda run: run.prompts.submit_prompts, prompts_pb2.SubmitPromptsRequest),
            "StreamPrompts": StreamStream(
                of_run(lambda run: run.prompts.submit_prompts), prompts_pb2.SubmitPromptsRequest
            ),
            "GetPrompt": unary(lambda run: run.prompts.get_prompt, prompts_pb2.GetPromptRequest),
            "ListPrompts": unary(lambda run: run.prompts.list_prompts, prompts_pb2.ListPromptsRequest),
            "CancelPrompts": unary(lambda run: run.prompts.cancel_prompts, prompts_pb2.CancelPromptsRequest),
            "WaitPrompt": unary(lambda run: run.prompts.wait_prompt, prompts_pb2.WaitPromptRequest),
            "WatchResults": stream(lambda run: run.prompts.watch_results, prompts_pb2.WatchResultsRequest),
        },
        "penstock.v1.GroupService": {
            "GetGroup": unary(lambda run: run.groups.get_group, groups_pb2.GetGroupRequest),
            "ListGroups": unary(lambda run: run.groups.list_groups, groups_pb2.ListGroupsRequest),
            "ListSamples": unary(lambda run: run.samples.list_samples, groups_pb2.ListSamplesRequest),
        },
        "penstock.v1.PolicyService": {
            "ListPolicies": unary(lambda run: run.policies.list_policies, policies_pb2.ListPoliciesRequest),
            "GetPolicy": unary(lambda run: run.policies.get_policy, policies_pb2.GetPolicyRequest),
            "WatchPolicies": stream(lambda run: run.policies.watch_policies, policies_pb2.WatchPoliciesRequest),
            "ComparePolicies": unary(lambda run: run.policies.compare_policies, policies_pb2.ComparePoliciesRequest),
            "PromotePolicy": unary(lambda run: run.policies.promote_policy, policies_pb2.ChangePolicyRequest),
            "RollBackPolicy": unary(lambda run: run.policies.roll_back_policy, policies_pb2.ChangePolicyRequest),
            "ReleasePolicy": unary(lambda run: run.policies.release_policy, policies_pb2.ReleasePolicyRequest),
            "PinPolicy": unary(lambda run: run.policies.pin_policy, policies_pb2.PinPolicyRequest),
            "UnpinPolicy": unary(lambda run: run.policies.unpin_policy, policies_pb2.UnpinPolicyRequest),
            "RetirePolicy": unary(lambda run: run.policies.retire_policy, policies_pb2.ChangePolicyRequest),
        },
        "penstock.v1.DatasetService": {
            "UploadDataset": unary(lambda run: run.datasets.upload_dataset, datasets_pb2.UploadDatasetRequest),
            "GetDataset": unary(lambda run: run.datasets.get_dataset, datasets_pb2.GetDatasetRequest),
            "SubmitDataset": unary(lambda run: run.datasets.submit_dataset, datasets_pb2.SubmitDatasetRequest),
        },
        "penstock.v1.GenerateService": {
            "Generate": stream(lambda run: run.generation.generate, generate_pb2.GenerateRequest),
        },
        "penstock.v1.SessionService": {
            "RewardSession": unary(lambda run: run.generation.reward_session, generate_pb2.RewardSessionRequest),
            "GetSession": unary(lambda run: run.sessions.get_session, sessions_pb2.GetSessionRequest),
            "ListSessions": unary(lambda run: run.sessions.list_sessions, sessions_pb2.ListSessionsRequest),
        },
        "penstock.v1.TaskService": {
            "SubmitTasks": unary(lambda run: run.tasks.submit_tasks, tasks_pb2.SubmitTasksRequest),
            "GetTask": unary(lambda run: run.tasks.get_task, tasks_pb2.GetTaskRequest),
            "LeaseTasks": unary(lambda run: run.tasks.lease_tasks, tasks_pb2.LeaseTasksRequest),
            "HeartbeatTasks": unary(lambda run: run.tasks.heartbeat_tasks, tasks_pb2.HeartbeatTasksRequest),
            "ReturnTask": unary(lambda run: run.tasks.return_task, tasks_pb2.ReturnTaskRequest),
        },
        "penstock.v1.RunService": {
            "GetRun": unary(lambda run: run.lifecycle.get_run, runs_pb2.GetRunRequest),
            "ListRuns": unary(lambda run: run.lifecycle.list_runs, runs_pb2.ListRunsRequest),
            "PauseRun": unary(lambda run: run.lifecycle.pause_run, runs_pb2.ChangeRunRequest),
            "ResumeRun": unary(lambda run: run.lifecycle.resume_run, runs_pb2.ChangeRunRequest),
            "StopRun": unary(lambda run: run.lifecycle.stop_run, runs_pb2.ChangeRunRequest),
            "ListMetrics": unary(lambda run: run.lifecycle.list_metrics, runs_pb2.ListMetricsRequest),
            "ListServers": unary(lambda run: run.servers.list_servers, runs_pb2.ListServersRequest),
            "DrainServer": unary(lambda run: run.servers.drain_server, runs_pb2.ChangeServerRequest),
            "UndrainServer": unary(lambda run: run.servers.undrain_server, runs_pb2.ChangeServerRequest),
            "CreateEvaluation": unary(lambda run: run.evaluations.create_evaluation, runs_pb2.CreateEvaluationRequest),
            "GetEvaluation": unary(lambda run: run.evaluations.get_evaluation, runs_pb2.GetEvaluationRequest),
            "ListDeadLetters": unary(lambda run: run.dead_letters.list_dead_letters, runs_pb2.ListDeadLettersRequest),
            "RequeueDeadLetter": unary(
                lambda run: run.dead_letters.requeue_dead_letter, runs_pb2.RequeueDeadLetterRequest
            ),
        },
    }
