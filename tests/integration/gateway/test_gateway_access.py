"""Roles, limits, the audit log, health, reflection and draining, in both protocols."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.requests import Request

from gateway_calls import assert_problem, rest, stubs
from gateways import PROMPT, RUN, Gateway, run_config, running
from penstock.api_keys import make_key
from penstock.client import PenstockClient
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Unauthenticated
from penstock.logs import setup_logging
from penstock.v1 import (
    generate_pb2,
    prompts_pb2,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import AuditLog
from penstock_services.gateway.routing import caller_of
from penstock_services.gateway.runs.collection import RunCollection
from penstock_services.gateway.served_runs import ServedRuns
from penstock_services.gateway.server import serve


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
        trailing = dict(caught.value.trailing_metadata() or ())
        assert trailing["reason"] == "RATE_LIMITED" and int(trailing["retry-after"]) > 0

        entries = [json.loads(line) for line in (config.folder / "audit.jsonl").read_text().splitlines()]
    assert [(e["key"], e["operation"], e["outcome"], e["request_id"]) for e in entries] == [
        ("reader", "pause_run", "PERMISSION_DENIED", "id-of-read"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "id-of-submit"),
        ("adminer", "pause_run", "OK", "id-of-admin"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "by-grpc"),
    ]
    assert not any(secret in (tmp_path / "keys").read_text() for secret in secrets.values())


async def test_nothing_runs_without_a_caller(redis_process: Any, redis_client: Any, tmp_path: Path) -> None:
    config, audit = run_config(redis_process.url, tmp_path), AuditLog(tmp_path / "audit.jsonl")
    served = ServedRuns.over(redis_client, redis_client, config, audit)
    run, nobody = await served.find(""), cast(Caller, None)
    for call in (
        run.lifecycle.pause_run(nobody, runs_pb2.ChangeRunRequest()),
        run.lifecycle.get_run(nobody, runs_pb2.GetRunRequest()),
        run.prompts.submit_prompts(nobody, prompts_pb2.SubmitPromptsRequest()),
        run.generation.generate(nobody, generate_pb2.GenerateRequest(text="hi")),
        RunCollection(config, audit, served).list_runs(nobody, runs_pb2.ListRunsRequest()),
    ):
        with pytest.raises(Unauthenticated, match="without a caller"):
            await call
    with pytest.raises(Unauthenticated, match="without authentication"):
        await caller_of(Request({"type": "http", "path": "/v1/runs", "headers": [], "query_string": b""}))
    assert not (await run.control.orders()).is_paused and not audit.path.exists()
    with pytest.raises(TypeError):
        Caller()  # type: ignore[call-arg]
    await served.close()


async def test_a_keys_file_that_breaks_is_logged_and_shown_in_health(
    configure: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, (secret, key), (new_secret, new_key) = tmp_path / "keys", make_key("old", "read"), make_key("new", "read")
    keys.write_text(key.line)
    async with running(configure(keys_file=keys)) as gateway:

        async def statuses() -> list[int]:
            headers = [{"Authorization": f"Bearer {one}"} for one in (secret, new_secret)]
            return [(await gateway.rest.get(RUN, headers=header)).status_code for header in headers]

        assert await statuses() == [200, 401] and (await rest(gateway, "GET", "/readyz"))["warnings"] == []
        breaks: list[Callable[[], Any]] = [lambda: keys.write_text("old read md5:0"), keys.unlink]
        for break_file in breaks:
            caplog.clear()
            break_file()
            assert await statuses() == [200, 401], "the keys that were read stay valid"
            [warning] = (await rest(gateway, "GET", "/readyz"))["warnings"]
            assert "gateway.keys_file" in warning and str(tmp_path) not in warning
            logged = [record.getMessage() for record in caplog.records if "stay valid" in record.getMessage()]
            assert len(logged) == 1 and str(keys) in logged[0], "once, not with every request"
        keys.write_text(new_key.line)
        assert await statuses() == [401, 200] and (await rest(gateway, "GET", "/readyz"))["warnings"] == []


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


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda **gateway: run_config(redis_process.url, tmp_path, **gateway)


async def test_the_key_is_needed_and_compared(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")
    async with running(configure(api_key_file=key_file)) as gateway:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = await gateway.rest.get(RUN, headers=headers)
            assert_problem(response, 401, "UNAUTHENTICATED")
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await gateway.rest.get(RUN, headers={"Authorization": "Bearer secret"})).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await gateway.rest.get(path)).status_code == 200

        runs = runs_pb2_grpc.RunServiceStub(gateway.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.GetRun(runs_pb2.GetRunRequest())
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert (
            await runs.GetRun(runs_pb2.GetRunRequest(), metadata=[("authorization", "Bearer secret")])
        ).run == "test"

        async with PenstockClient.from_run_dir(gateway.config.folder, "secret") as client:
            assert (await client.get_run()).run == "test"
        async with PenstockClient.from_run_dir(gateway.config.folder) as client:
            with pytest.raises(Unauthenticated):
                await client.get_run()


async def test_a_public_address_needs_a_key(configure: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is not loopback.*gateway\.api_key_file"):
        await serve(configure(host="0.0.0.0"))
