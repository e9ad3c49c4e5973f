"""Roles, limits, the audit log, health, reflection and draining, in both protocols."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from penstock.api_keys import make_key
from penstock.client import PenstockClient
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Unauthenticated
from penstock.logs import setup_logging
from penstock.v1 import (
    prompts_pb2,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway.access import Access, Caller
from penstock_services.gateway.metrics import GatewayMetrics
from penstock_services.gateway.rest import HttpRequest, call_http
from penstock_services.gateway.run import ServedRun, serve_operations
from penstock_services.gateway.server import serve
from support.gateways import PROMPT, RUN, Gateway, assert_problem, rest, run_config, running, stubs


async def test_scopes_limits_and_the_audit_log(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> None:
    secrets, lines = {}, []
    for scope in ("read", "submit", "admin"):
        secrets[scope], key = make_key(f"{scope}er", scope)  # type: ignore[arg-type]
        lines.append(key.line)
    (tmp_path / "keys").write_text("\n".join(lines))
    config = run_config(
        redis_process.url, tmp_path, keys_file=tmp_path / "keys", requests_per_s=0.001, burst_requests=6
    )
    async with running(config) as gateway:
        runs = runs_pb2_grpc.RunServiceStub(gateway.channel)
        expected = {"read": (200, 403, 403), "submit": (200, 200, 403), "admin": (200, 200, 200)}
        for scope, codes in expected.items():
            headers = {"Authorization": f"Bearer {secrets[scope]}", "X-Request-Id": f"id-of-{scope}"}
            answers = [
                await gateway.rest.get(RUN, headers=headers),
                await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [PROMPT]}, headers=headers),
                await gateway.rest.post(f"{RUN}:pause", headers=headers),
            ]
            assert tuple(answer.status_code for answer in answers) == codes
            assert {answer.headers["x-request-id"] for answer in answers} == {f"id-of-{scope}"}
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
    config = run_config(redis_process.url, tmp_path)
    run, nobody = ServedRun.create(redis_client, redis_client, config), cast(Caller, None)
    access = Access.load(config.gateway, tmp_path)
    operations = serve_operations(run, GatewayMetrics(CollectorRegistry(), ""), access)

    async def read() -> Any:
        raise AssertionError("the request was read")

    for served in operations:
        if served.operation.rpcs:
            with pytest.raises(Unauthenticated, match="without a caller"):
                await served.call(nobody, read)
        elif served.operation.scope is not None:
            request = HttpRequest({"type": "http", "path": "/", "headers": [], "query_string": b""}, cast(Any, None))
            with pytest.raises(Unauthenticated, match="without a caller"):
                await call_http(served, request)
    assert not (await run.stores.control.orders()).is_paused and not (config.folder / "audit.jsonl").exists()
    with pytest.raises(TypeError):
        Caller()  # type: ignore[call-arg]
    await run.close()


class Keys:
    """Two keys and the file of a gateway that is about to break."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys"
        (self.old, old), (self.new, new) = make_key("old", "read"), make_key("new", "read")
        self.old_line, self.new_line = old.line, new.line
        self.file.write_text(self.old_line)

    async def statuses(self, gateway: Gateway) -> list[int]:
        headers = [{"Authorization": f"Bearer {one}"} for one in (self.old, self.new)]
        return [(await gateway.rest.get(RUN, headers=header)).status_code for header in headers]


async def broken_files(gateway: Gateway) -> tuple[list[str], str]:
    """The warnings of health, and the lines about keys in the metrics."""
    metrics = (await gateway.rest.get("/metrics")).text.splitlines()
    lines = [line for line in metrics if line.startswith(("penstock_gateway_api_keys", "penstock_gateway_broken"))]
    return (await rest(gateway, "GET", "/readyz"))["warnings"], " ".join(line.split(" ")[1] for line in lines)


async def test_a_keys_file_that_breaks_keeps_its_keys_for_a_while(
    configure: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys = Keys(tmp_path)
    async with running(configure(keys_file=keys.file, keys_grace_s=300)) as gateway:
        assert await keys.statuses(gateway) == [200, 401] and await broken_files(gateway) == ([], "1.0 0.0")
        keys.file.write_text("old read md5:0")
        assert await keys.statuses(gateway) == [200, 401], "the keys that were read stay valid"
        [warning], numbers = await broken_files(gateway)
        assert "gateway.keys_file" in warning and str(tmp_path) not in warning and numbers == "1.0 1.0"
        logged = [record.getMessage() for record in caplog.records if "stay valid for 300 s" in record.getMessage()]
        assert len(logged) == 1 and str(keys.file) in logged[0], "once, not with every request"
        broken_at = time.monotonic()
        monkeypatch.setattr("penstock.api_keys.monotonic", lambda: broken_at + 301)
        assert await keys.statuses(gateway) == [401, 401], "but not for ever"
        assert (await broken_files(gateway))[1] == "0.0 1.0"
        assert [record for record in caplog.records if "no longer valid" in record.getMessage()]
        keys.file.write_text(keys.new_line)
        assert await keys.statuses(gateway) == [401, 200] and await broken_files(gateway) == ([], "1.0 0.0")


@pytest.mark.parametrize("change", ["empty", "comment", "missing", "missing after a mistake"])
async def test_a_keys_file_that_is_empty_or_gone_revokes_its_keys(
    configure: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    keys = Keys(tmp_path)
    async with running(configure(keys_file=keys.file)) as gateway:
        assert await keys.statuses(gateway) == [200, 401]
        if change == "missing after a mistake":
            keys.file.write_text("nonsense")
            assert await keys.statuses(gateway) == [200, 401]
        if change in ("empty", "comment"):
            keys.file.write_text("# nobody\n" if change == "comment" else "")
        else:
            keys.file.unlink()
        assert await keys.statuses(gateway) == [401, 401]
        assert (await gateway.rest.get(RUN)).status_code == 401, "and nobody is let in instead"
        warnings, numbers = await broken_files(gateway)
        assert len(warnings) == 1 and numbers == "0.0 1.0"
        assert len([r for r in caplog.records if "no key of this file is valid" in r.getMessage()]) == 1
        keys.file.write_text(keys.new_line)
        assert await keys.statuses(gateway) == [401, 200]


async def test_a_key_that_is_removed_ends_its_streams(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    (old_secret, old), (new_secret, new) = make_key("old@team", "submit"), make_key("new@team", "submit")
    old_headers, new_headers = ({"Authorization": f"Bearer {secret}"} for secret in (old_secret, new_secret))
    (tmp_path / "keys").write_text(f"{old.line}\n{new.line}\n")
    async with running(configure(keys_file=tmp_path / "keys")) as gateway, asyncio.timeout(100):
        prompts, *_ = stubs(gateway)
        message = prompts_pb2.Message(role="user", content="hi")
        wanted = prompts_pb2.SubmitPromptsRequest(prompts=[prompts_pb2.Prompt(messages=[message], num_samples=1)])
        submitting = prompts.StreamPrompts(metadata=[("authorization", old_headers["Authorization"])])
        await submitting.write(wanted)
        [prompt_id] = (await submitting.read()).prompt_ids
        async with gateway.rest.stream("GET", f"{RUN}/results", headers=old_headers) as response:
            (tmp_path / "keys").write_text(new.line)
            cancelled = {"prompt_ids": [prompt_id]}
            await rest(gateway, "POST", f"{RUN}/prompts:cancel", json=cancelled, headers=new_headers)
            lines = [line async for line in response.aiter_lines() if line.startswith(("event", "data"))]
        assert lines[0] == "event: problem" and json.loads(lines[1][6:])["reason"] == "UNAUTHENTICATED", lines
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submitting.write(wanted)
            await submitting.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_change_between_reading_the_keys_and_the_first_request_is_seen(
    configure: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, read_text = Keys(tmp_path), Path.read_text

    def read_then_change(path: Path, *args: Any, **options: Any) -> str:
        text = read_text(path, *args, **options)
        if path == keys.file:
            keys.file.write_text(keys.new_line)
        return text

    config = configure(keys_file=keys.file)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_then_change)
        access = Access.load(config.gateway, tmp_path)
    assert access.authenticate(f"Bearer {keys.new}", "1").name == "new"
    with pytest.raises(Unauthenticated):
        access.authenticate(f"Bearer {keys.old}", "2")


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
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    async for answer in stub.ServerReflectionInfo(ask()):
        names = {service.name for service in answer.list_services_response.service}
    assert names > {"penstock.v1.PromptService", "penstock.v1.PolicyService", "grpc.health.v1.Health"}


async def test_grpc_checks_the_key_before_it_reads_the_request(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr("penstock_services.gateway.rpc._parse", lambda kind, data: parsed.append(data) or kind())
    target = f"127.0.0.1:{gateway.grpc_port}"
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for path in (
            "penstock.v1.RunService/PauseRun",
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "grpc.health.v1.Health/Watch",
        ):

            async def never() -> AsyncIterator[bytes]:
                await asyncio.Event().wait()
                yield b""

            call: Any = channel.stream_unary(f"/{path}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(never(), timeout=100)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, "before any byte of the request has arrived"
        assert parsed == []
        health = health_pb2_grpc.HealthStub(channel)
        assert await health.Check(health_pb2.HealthCheckRequest(), timeout=100), "probes have no key"


async def test_grpc_bytes_that_are_not_a_request_are_the_client_s_mistake(gateway: Gateway) -> None:
    for path in ("PromptService/SubmitPrompts", "PromptService/WatchResults", "PromptService/StreamPrompts"):
        call: Any = gateway.channel.stream_stream(f"/penstock.v1.{path}")(iter([b"\xff\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
        assert dict(caught.value.trailing_metadata() or ())["field"] == "request"


async def test_watchers_do_not_hold_up_a_gateway_that_stops(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_services.gateway.server.STOP_GRACE_S", 600.0)
    async with running(configure()) as gateway:
        prompts, *_ = stubs(gateway)
        async with gateway.rest.stream("GET", f"{RUN}/results") as response:
            call = prompts.WatchResults(prompts_pb2.WatchResultsRequest())
            await call.wait_for_connection()
            gateway.stop.set()
            async with asyncio.timeout(100):  # less than requests in flight have
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
        refused = {
            "": "needs an API key",
            "Bearer wrong": "not one of the gateway's",
            "Basic secret": "needs an API key",
        }
        for header, said in refused.items():
            response = await gateway.rest.get(RUN, headers={"Authorization": header} if header else {})
            assert_problem(response, 401, "UNAUTHENTICATED")
            assert said in response.json()["detail"]
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
