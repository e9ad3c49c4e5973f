"""Lists the scope that every operation needs, in both protocols, and tries each operation with keys that are too weak.

A test fails if an operation of the contracts or of the OpenAPI schema is not listed here, or if a listed operation does
not exist.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
import redis.asyncio as redis

from penstock.api_keys import make_key
from penstock.v1 import (
    datasets_pb2,
    generate_pb2,
    groups_pb2,
    policies_pb2,
    prompts_pb2,
    runs_pb2,
    runs_pb2_grpc,
    sessions_pb2,
    tasks_pb2,
)
from support.gateways import PROMPT, Gateway, run_config, running

Scope = Literal["read", "submit", "admin"]
WEAKER: dict[Scope, tuple[Scope, ...]] = {"read": (), "submit": ("read",), "admin": ("read", "submit")}
ANSWER_TIMEOUT_S = 100.0

GRPC_SCOPES: dict[str, Scope] = {
    "PromptService/SubmitPrompts": "submit",
    "PromptService/StreamPrompts": "submit",
    "PromptService/GetPrompt": "read",
    "PromptService/ListPrompts": "read",
    "PromptService/CancelPrompts": "submit",
    "PromptService/WaitPrompt": "read",
    "PromptService/WatchResults": "read",
    "GroupService/GetGroup": "read",
    "GroupService/ListGroups": "read",
    "GroupService/ListSamples": "read",
    "PolicyService/ListPolicies": "read",
    "PolicyService/GetPolicy": "read",
    "PolicyService/WatchPolicies": "read",
    "PolicyService/ComparePolicies": "read",
    "PolicyService/PromotePolicy": "admin",
    "PolicyService/RewindPolicy": "admin",
    "PolicyService/ReleasePolicy": "admin",
    "PolicyService/PinPolicy": "admin",
    "PolicyService/UnpinPolicy": "admin",
    "PolicyService/RetirePolicy": "admin",
    "DatasetService/UploadDataset": "submit",
    "DatasetService/GetDataset": "read",
    "DatasetService/SubmitDataset": "submit",
    "GenerateService/Generate": "submit",
    "SessionService/RewardSession": "submit",
    "SessionService/GetSession": "read",
    "SessionService/ListSessions": "read",
    "TaskService/SubmitTasks": "submit",
    "TaskService/GetTask": "read",
    "TaskService/LeaseTasks": "submit",
    "TaskService/HeartbeatTasks": "submit",
    "TaskService/ReturnTask": "submit",
    "RunService/GetRun": "read",
    "RunService/ListRuns": "read",
    "RunService/ListMetrics": "read",
    "RunService/ListServers": "read",
    "RunService/GetEvaluation": "read",
    "RunService/ListDeadLetters": "read",
    "RunService/CreateEvaluation": "submit",
    "RunService/PauseRun": "admin",
    "RunService/ResumeRun": "admin",
    "RunService/StopRun": "admin",
    "RunService/DrainServer": "admin",
    "RunService/UndrainServer": "admin",
    "RunService/RequeueDeadLetter": "admin",
}
WATCHES = ("PromptService/WatchResults", "PolicyService/WatchPolicies")
"""These never end by themselves."""
CONTRACTS = (datasets_pb2, generate_pb2, groups_pb2, policies_pb2, prompts_pb2, runs_pb2, sessions_pb2, tasks_pb2)

REST_SCOPES: dict[str, Scope] = {
    "GET /v1/runs": "read",
    "GET /v1/runs/{run}": "read",
    "POST /v1/runs/{run}:pause": "admin",
    "POST /v1/runs/{run}:resume": "admin",
    "POST /v1/runs/{run}:stop": "admin",
    "GET /v1/runs/{run}/metrics": "read",
    "GET /v1/runs/{run}/servers": "read",
    "POST /v1/runs/{run}/servers/{server_id}:drain": "admin",
    "POST /v1/runs/{run}/servers/{server_id}:undrain": "admin",
    "POST /v1/runs/{run}/evaluations": "submit",
    "GET /v1/runs/{run}/evaluations/{evaluation_id}": "read",
    "GET /v1/runs/{run}/dead-letters": "read",
    "POST /v1/runs/{run}/dead-letters/{letter_id}:requeue": "admin",
    "GET /v1/runs/{run}/prompts": "read",
    "POST /v1/runs/{run}/prompts": "submit",
    "POST /v1/runs/{run}/prompts:cancel": "submit",
    "GET /v1/runs/{run}/prompts/{prompt_id}:wait": "read",
    "GET /v1/runs/{run}/prompts/{prompt_id}": "read",
    "GET /v1/runs/{run}/results": "read",
    "GET /v1/runs/{run}/groups": "read",
    "GET /v1/runs/{run}/groups/{prompt_id}": "read",
    "GET /v1/runs/{run}/samples": "read",
    "GET /v1/runs/{run}/policies": "read",
    "GET /v1/runs/{run}/policies:watch": "read",
    "GET /v1/runs/{run}/policies:compare": "read",
    "POST /v1/runs/{run}/policies:release": "admin",
    "POST /v1/runs/{run}/policies/{policy_version}:promote": "admin",
    "POST /v1/runs/{run}/policies/{policy_version}:rewind": "admin",
    "POST /v1/runs/{run}/policies/{policy_version}:retire": "admin",
    "GET /v1/runs/{run}/policies/{policy_version}": "read",
    "PUT /v1/runs/{run}/pins/{pin}": "admin",
    "DELETE /v1/runs/{run}/pins/{pin}": "admin",
    "PUT /v1/runs/{run}/datasets/{name}": "submit",
    "GET /v1/runs/{run}/datasets/{name}": "read",
    "POST /v1/runs/{run}/datasets/{name}:submit": "submit",
    "POST /v1/chat/completions": "submit",
    "POST /v1/completions": "submit",
    "POST /v1/responses": "submit",
    "POST /v1/messages": "submit",
    "POST /v1/messages/count_tokens": "submit",
    "GET /v1/models": "read",
    "GET /v1/models/{model}": "read",
    "POST /v1/sessions/{session_id}/reward": "submit",
    "GET /v1/sessions": "read",
    "GET /v1/sessions/{session_id}": "read",
    "POST /v1/tasks": "submit",
    "POST /v1/tasks:lease": "submit",
    "POST /v1/tasks:heartbeat": "submit",
    "POST /v1/tasks:return": "submit",
    "GET /v1/tasks/{task_id}": "read",
}
OPEN = {"GET /", "GET /console/{name}", "GET /docs", "GET /docs/{file}", "GET /metrics"} | {
    f"GET /{probe}" for probe in ("healthz", "startupz", "readyz")
}
"""Answered without a key."""
EVENT_STREAMS = {"GET /v1/runs/{run}/results", "GET /v1/runs/{run}/policies:watch"}
NAMES = {
    "run": "test", "policy_version": "1", "prompt_id": "99", "pin": "p", "name": "console.js", "server_id": "s",
    "file": "page.js",
    "evaluation_id": "e", "letter_id": "1-0", "session_id": "s", "model": "test", "task_id": "t",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "POST /v1/runs/{run}/evaluations": {"evaluation_id": "e", "prompts": [PROMPT]},
    "POST /v1/runs/{run}/prompts": {"prompts": [PROMPT]},
    "POST /v1/runs/{run}/prompts:cancel": {"prompt_ids": [1]},
    "PUT /v1/runs/{run}/pins/{pin}": {"policy_version": 1},
    "POST /v1/runs/{run}/datasets/{name}:submit": {},
    "POST /v1/chat/completions": {"model": "test", "messages": [{"role": "user", "content": "2+2?"}]},
    "POST /v1/completions": {"model": "test", "prompt": "2+2?"},
    "POST /v1/responses": {"model": "test", "input": "2+2?"},
    "POST /v1/messages": {"model": "test", "max_tokens": 8, "messages": [{"role": "user", "content": "2+2?"}]},
    "POST /v1/messages/count_tokens": {"model": "test", "messages": [{"role": "user", "content": "2+2?"}]},
    "POST /v1/sessions/{session_id}/reward": {"reward": 1.0},
    "POST /v1/tasks": {"tasks": [{"payload": 1}]},
    "POST /v1/tasks:lease": {"worker": "w"},
    "POST /v1/tasks:heartbeat": {"session_ids": []},
    "POST /v1/tasks:return": {"session_id": "s"},
}


@pytest.fixture
async def guarded(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    """A gateway with a key of every scope, and the keys' `Authorization` headers."""
    keys = {scope: make_key(scope, scope) for scope in WEAKER}
    (tmp_path / "keys").write_text("\n".join(key.line for _, key in keys.values()))
    async with running(run_config(redis_process.url, tmp_path, keys_file=tmp_path / "keys")) as gateway:
        yield gateway, {scope: f"Bearer {secret}" for scope, (secret, _) in keys.items()}


def test_every_method_of_the_contracts_has_a_role() -> None:
    services = [service for contract in CONTRACTS for service in contract.DESCRIPTOR.services_by_name.values()]
    assert {f"{service.name}/{method}" for service in services for method in service.methods_by_name} == set(
        GRPC_SCOPES
    )


async def test_grpc_refuses_a_scope_that_is_too_weak(guarded: tuple[Gateway, dict[str, str]]) -> None:
    gateway, headers = guarded
    for method, scope in GRPC_SCOPES.items():
        assert await grpc_code(gateway, method, None) == grpc.StatusCode.UNAUTHENTICATED, method
        for weaker in WEAKER[scope]:
            found = await grpc_code(gateway, method, headers[weaker])
            assert found == grpc.StatusCode.PERMISSION_DENIED, (method, weaker)


async def test_grpc_serves_a_role_that_suffices(guarded: tuple[Gateway, dict[str, str]]) -> None:
    """The requests are empty. They may be refused because of their content, but not because of the key."""
    gateway, headers = guarded
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
    for method, scope in GRPC_SCOPES.items():
        assert await grpc_code(gateway, method, headers[scope]) not in refusals, method


async def grpc_code(gateway: Gateway, method: str, authorization: str | None) -> grpc.StatusCode:
    """The code of a call with an empty request. A stream that opens without an error is OK and is closed again."""
    metadata = () if authorization is None else (("authorization", authorization),)
    path = f"/penstock.v1.{method}"
    descriptor = next(
        contract.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        for service, name in [method.split("/")]
        for contract in CONTRACTS
        if service in contract.DESCRIPTOR.services_by_name
    )
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if not descriptor.server_streaming:
                await gateway.channel.unary_unary(path)(b"", metadata=metadata)
                return grpc.StatusCode.OK
            call = (
                gateway.channel.stream_stream(path)(iter([b""]), metadata=metadata)
                if descriptor.client_streaming
                else gateway.channel.unary_stream(path)(b"", metadata=metadata)
            )
            await call.wait_for_connection()
            if method in WATCHES:
                call.cancel()
                return grpc.StatusCode.OK
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_rest_operation_has_a_role(gateway: Gateway) -> None:
    paths = (await gateway.rest.get("/v1/openapi.json")).json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert served == set(REST_SCOPES) | OPEN


async def test_rest_refuses_a_scope_that_is_too_weak(guarded: tuple[Gateway, dict[str, str]]) -> None:
    gateway, headers = guarded
    for operation, scope in REST_SCOPES.items():
        assert await rest_status(gateway, operation, None) == 401, operation
        for weaker in WEAKER[scope]:
            assert await rest_status(gateway, operation, headers[weaker]) == 403, (operation, weaker)
    assert await rest_status(gateway, "GET /v1/openapi.json", None) == 401


async def test_rest_serves_a_role_that_suffices(guarded: tuple[Gateway, dict[str, str]]) -> None:
    gateway, headers = guarded
    for operation, scope in REST_SCOPES.items():
        assert await rest_status(gateway, operation, headers[scope]) not in (401, 403, 405), operation
    for operation in OPEN:
        assert await rest_status(gateway, operation, None) == 200, operation


async def test_the_role_is_checked_before_the_run_is_looked_up(guarded: tuple[Gateway, dict[str, str]]) -> None:
    gateway, headers = guarded
    for key, status in (("read", 403), ("submit", 403), ("admin", 404)):
        answer = await gateway.rest.post("/v1/runs/nowhere:pause", headers={"Authorization": headers[key]})
        assert answer.status_code == status
        runs: Any = runs_pb2_grpc.RunServiceStub(gateway.channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await runs.StopRun(runs_pb2.ChangeRunRequest(run="nowhere"), metadata=(("authorization", headers[key]),))
        pause = gateway.channel.unary_unary("/penstock.v1.RunService/PauseRun")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pause(b"\xff", metadata=(("authorization", headers[key]),))
        expected = grpc.StatusCode.INVALID_ARGUMENT if key == "admin" else grpc.StatusCode.PERMISSION_DENIED
        assert refused.value.code() == expected, "a caller without the right learns nothing of its request"
    written = [json.loads(line) for line in (gateway.config.folder / "audit.jsonl").read_text().splitlines()]
    damaged = [entry["outcome"] for entry in written if not entry["request"]["run"]]
    assert damaged == ["PERMISSION_DENIED", "PERMISSION_DENIED", "INVALID_INPUT"]
    written = [entry for entry in written if entry["request"]["run"]]
    assert [(e["key"], e["operation"], e["request"], e["outcome"]) for e in written] == [
        (key, operation, {"run": "nowhere"}, "NOT_FOUND" if key == "admin" else "PERMISSION_DENIED")
        for key in ("read", "submit", "admin")
        for operation in ("pause_run", "stop_run")
    ]


async def rest_status(gateway: Gateway, operation: str, authorization: str | None) -> int:
    method, path = operation.split(" ")
    headers = {} if authorization is None else {"Authorization": authorization}
    if operation.startswith("PUT /v1/runs/{run}/datasets"):
        headers["Content-Type"] = "application/x-ndjson"
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        async with gateway.rest.stream(
            method, path.format_map(NAMES), headers=headers, json=BODIES.get(operation)
        ) as answer:
            if operation not in EVENT_STREAMS:
                await answer.aread()
            return answer.status_code
