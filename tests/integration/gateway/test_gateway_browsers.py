"""What a browser may send for another site, and who a caller without a key is: nobody."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis

from penstock.api_keys import OWN_KEY_FILE
from penstock.client import PenstockClient
from penstock.client.address import GatewayAddress
from penstock.config.run import RunConfig
from penstock.config.service import GatewayConfig
from penstock.errors import Unauthenticated
from penstock.store.fleet import RunControl
from penstock.v1 import runs_pb2, runs_pb2_grpc
from penstock_services.gateway.access import AllowedHosts
from support.gateways import PROMPT, RUN, Gateway, assert_problem, run_config, running

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Configure:
    return lambda **gateway: run_config(redis_process.url, tmp_path, **gateway)


async def test_no_one_is_a_caller_without_a_key(gateway: Gateway) -> None:
    """Not even on loopback, where other users and every web page that is open can call too."""
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as nobody:
        for method, path in (("GET", RUN), ("POST", f"{RUN}:pause"), ("GET", "/v1/openapi.json")):
            assert_problem(await nobody.request(method, path), 401, "UNAUTHENTICATED")
        for path in ("/", "/healthz", "/startupz", "/readyz", "/metrics"):
            assert (await nobody.get(path)).status_code == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs_pb2_grpc.RunServiceStub(channel).PauseRun(runs_pb2.ChangeRunRequest())
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_clients_on_the_machine_find_the_gateway_s_own_key(gateway: Gateway, configure: Configure) -> None:
    key_file = gateway.config.folder / OWN_KEY_FILE
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    async with PenstockClient.from_run_dir(gateway.config.folder) as client:
        assert (await client.get_run()).run == "test"
    made = key_file.read_text()
    gateway.stop.set()
    await gateway.task
    async with running(configure()) as again:
        assert key_file.read_text() == made, "it stays the same when the gateway is restarted"
        assert GatewayAddress.from_run_dir(again.config.folder).api_key == made.strip()
        key_file.unlink()
        async with PenstockClient(again.url, api_key=made.strip()) as client:
            with pytest.raises(Unauthenticated, match=OWN_KEY_FILE):
                await client.get_run()


async def test_a_foreign_page_changes_nothing(gateway: Gateway, redis_client: redis.Redis) -> None:
    control = RunControl(redis_client, "test")  # type: ignore[arg-type]
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"{gateway.url}.evil.example", "file://"):
        answer = await gateway.rest.post(f"{RUN}:pause", headers={"Origin": origin})
        assert_problem(answer, 403, "FOREIGN_ORIGIN")
    assert not (await control.orders()).is_paused
    assert (await gateway.rest.post(f"{RUN}:pause", headers={"Origin": gateway.url})).status_code == 200
    assert (await control.orders()).is_paused


async def test_a_name_that_was_pointed_at_the_gateway_is_refused(gateway: Gateway) -> None:
    port = gateway.rest_port
    for path in (RUN, "/", "/metrics", "/healthz"):
        assert_problem(await gateway.rest.get(path, headers={"Host": f"evil.example:{port}"}), 421, "UNKNOWN_HOST")
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "10.1.2.3", f"[::1]:{port}", f"run.localhost:{port}"):
            assert (await gateway.rest.get(path, headers={"Host": host})).status_code == 200, host


async def test_an_allowed_host_is_answered_and_its_pages_may_call(configure: Configure) -> None:
    async with running(configure(allowed_hosts=["penstock.example"])) as gateway:
        for headers, status in (
            ({"Host": "penstock.example"}, 200),
            ({"Host": "other.example"}, 421),
            ({"Host": "127.0.0.1", "Origin": "https://penstock.example"}, 200),
            ({"Host": "127.0.0.1", "Origin": "https://other.example"}, 403),
        ):
            assert (await gateway.rest.get(RUN, headers=headers)).status_code == status, headers


def test_a_public_gateway_takes_any_name_unless_told_otherwise() -> None:
    assert AllowedHosts(GatewayConfig(host="0.0.0.0")).allow("gateway.example")
    assert not AllowedHosts(GatewayConfig(host="0.0.0.0", allowed_hosts=["a.example"])).allow("gateway.example")
    for wrong in ("[", "a b", "evil.example@localhost", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert not AllowedHosts(GatewayConfig()).allow(wrong), wrong


async def test_a_body_needs_the_type_of_what_it_is(gateway: Gateway) -> None:
    """A page of another site can send these types without asking first."""
    body = httpx.Request("POST", "http://x", json={"prompts": [PROMPT]}).content
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "text/plain;a/json",
        "",
    ):
        for path in (f"{RUN}/prompts", f"{RUN}/prompts:cancel", "/v1/chat/completions"):
            answer = await gateway.rest.post(path, content=body, headers={"Content-Type": kind})
            assert_problem(answer, 415, "UNSUPPORTED_MEDIA_TYPE")
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        answer = await gateway.rest.post(f"{RUN}/prompts", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 200, answer.text
    async with asyncio.timeout(100):
        assert (await gateway.rest.get(f"{RUN}/prompts")).json()["prompts"][1]["prompt_id"] == 2
