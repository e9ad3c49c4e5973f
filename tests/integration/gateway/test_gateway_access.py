"""Roles, limits, the audit log, health, reflection and draining, in both protocols."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway_calls import rest, stubs
from gateways import PROMPT, RUN, Gateway, run_config, running
from penstock.api_keys import make_key
from penstock.logs import setup_logging
from penstock.v1 import prompts_pb2, runs_pb2, runs_pb2_grpc


async def test_roles_limits_and_the_audit_log(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> None:
    secrets, lines = {}, []
    for role in ("read", "submit", "admin"):
        secrets[role], key = make_key(f"{role}er", role)  # type: ignore[arg-type]
        lines.append(key.line)
    (tmp_path / "keys").write_text("\n".join(lines))
    config = run_config(
        redis_process.url, tmp_path, keys_file=tmp_path / "keys", requests_per_s=0.001, burst_requests=6
    )
    async with running(config) as gateway:
        runs = runs_pb2_grpc.RunServiceStub(gateway.channel)
        expected = {"read": (200, 403, 403), "submit": (200, 200, 403), "admin": (200, 200, 200)}
        for role, codes in expected.items():
            headers = {"Authorization": f"Bearer {secrets[role]}", "X-Request-Id": f"id-of-{role}"}
            answers = [
                await gateway.rest.get(RUN, headers=headers),
                await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [PROMPT]}, headers=headers),
                await gateway.rest.post(f"{RUN}:pause", headers=headers),
            ]
            assert tuple(answer.status_code for answer in answers) == codes
            assert {answer.headers["x-request-id"] for answer in answers} == {f"id-of-{role}"}
        metadata = (("authorization", f"Bearer {secrets['submit']}"), ("x-request-id", "by-grpc"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.PauseRun(runs_pb2.ChangeRunRequest(run="test"), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert ("x-request-id", "by-grpc") in list(caught.value.trailing_metadata())

        headers = {"Authorization": f"Bearer {secrets['submit']}"}
        codes = [(await gateway.rest.get(RUN, headers=headers)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = await gateway.rest.get(RUN, headers=headers)
        assert refused.json()["reason"] == "RATE_LIMITED" and int(refused.headers["retry-after"]) > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.GetRun(runs_pb2.GetRunRequest(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

        entries = [json.loads(line) for line in (config.folder / "audit.jsonl").read_text().splitlines()]
    assert [(e["key"], e["operation"], e["outcome"], e["request_id"]) for e in entries] == [
        ("reader", "pause_run", "PERMISSION_DENIED", "id-of-read"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "id-of-submit"),
        ("adminer", "pause_run", "OK", "id-of-admin"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "by-grpc"),
    ]
    assert not any(secret in (tmp_path / "keys").read_text() for secret in secrets.values())


async def test_a_log_line_names_the_request_it_is_about(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_LOG", "json")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    setup_logging("gateway", "test")
    (gateway.config.folder / "audit.jsonl").mkdir(parents=True)
    await rest(gateway, "POST", f"{RUN}:pause", headers={"X-Request-Id": "by-rest"})
    _, _, _, runs = stubs(gateway)
    await runs.ResumeRun(runs_pb2.ChangeRunRequest(), metadata=(("x-request-id", "by-grpc"),))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["run"], line["request_id"]) for line in lines if "audit log" in line["message"]] == [
        ("test", "by-rest"), ("test", "by-grpc"),
    ]  # fmt: skip


async def test_health_and_reflection(gateway: Gateway) -> None:
    health = health_pb2_grpc.HealthStub(gateway.channel)
    for service in ("", "penstock.v1.RunService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    async for answer in stub.ServerReflectionInfo(ask()):
        names = {service.name for service in answer.list_services_response.service}
    assert names > {"penstock.v1.PromptService", "penstock.v1.PolicyService", "grpc.health.v1.Health"}


async def test_watchers_do_not_hold_up_a_gateway_that_stops(gateway: Gateway) -> None:
    prompts, *_ = stubs(gateway)
    async with gateway.rest.stream("GET", f"{RUN}/results") as response:
        call = prompts.WatchResults(prompts_pb2.WatchResultsRequest())
        await call.wait_for_connection()
        gateway.stop.set()
        async with asyncio.timeout(8):  # less than requests in flight have
            assert [line async for line in response.aiter_lines() if line.startswith("data")] == []
            async with aclosing(aiter(call)) as results:  # type: ignore[type-var]
                assert [result async for result in results] == []
            await gateway.task
