"""The clients and commands against a gateway, over TLS, and through its death."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis

from penstock.api.records import Run
from penstock.api_keys import make_key, make_own_key
from penstock.cli import main as cli
from penstock.client import PenstockClient, SyncPenstockClient
from penstock.codec import encode_group
from penstock.config.loading import dump_config
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PermissionDenied,
)
from penstock.machine import free_port
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.trajectory import Prompt
from penstock.v1 import (
    policies_pb2,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway.server import check
from support.certificates import make_certificate
from support.gateways import Gateway, group_of, publish, run_config, running

PROMPT = Prompt(messages=(("user", "2+2?"),), num_samples=2)


async def test_results_go_on_where_a_broken_stream_ended(gateway: Gateway, queue: RedisReplayQueue) -> None:
    class Breaking(httpx.AsyncHTTPTransport):
        num_streams = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if not request.url.path.endswith("/results"):
                return response
            self.num_streams += 1
            if self.num_streams > 1:
                return response
            inner = response.stream

            async def one_event() -> AsyncIterator[bytes]:
                async for part in inner:  # type: ignore[union-attr]
                    yield part
                    if b"data: " in part:
                        await response.aclose()
                        raise httpx.ReadError("broken")

            class Stream(httpx.AsyncByteStream):
                def __aiter__(self) -> AsyncIterator[bytes]:
                    return one_event()

            return httpx.Response(200, headers=response.headers, stream=Stream())

    transport = Breaking()
    async with PenstockClient(gateway.url, api_key=gateway.key, transport=transport) as client:
        ids = (await client.submit([PROMPT] * 3)).prompt_ids
        leases = await queue.lease("s", 3)
        await queue.append(leases[0], encode_group(group_of(1, 1)), 3)
        seen = []
        async with asyncio.timeout(100):
            async for result in client.results("0"):
                seen.append(result.prompt_id)
                if len(seen) == 1:
                    for lease in leases[1:]:
                        await queue.append(lease, encode_group(group_of(lease.prompt_id, 1)), 3)
                if len(seen) == 3:
                    break
    assert tuple(seen) == ids and transport.num_streams > 1


async def test_prompts_are_waited_for_and_cancelled_by_both_clients(gateway: Gateway, queue: RedisReplayQueue) -> None:
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        first, second = (await client.submit([PROMPT] * 2)).prompt_ids
        with pytest.raises(DeadlineExceeded, match="is PENDING"):
            await client.wait_for_prompt(first, timeout_s=0.2)
        waiting = asyncio.create_task(client.wait_for_prompt(first, timeout_s=100))
        [lease, _] = await queue.lease("s", 2)
        await queue.append(lease, encode_group(group_of(1, 1)), 3)
        assert (await waiting).state == "QUEUED"
        assert (await client.groups()).groups[0].prompt_id == first

    def use() -> None:
        with SyncPenstockClient(gateway.url, api_key=gateway.key) as client:
            assert [record.state for record in client.cancel([second])] == ["CANCELLED"]
            assert client.wait_for_prompt(second, 60).state == "CANCELLED"
            seen = [next(results).prompt_id for results in [client.results("0")] for _ in range(2)]
            assert seen == [first, second]
            assert client.pause_run().state == "PAUSED" and client.resume_run().state == "WAITING"

    await asyncio.to_thread(use)


async def test_typed_answers_omit_nothing(gateway: Gateway, queue: RedisReplayQueue) -> None:
    """Converted back to JSON, each typed answer equals the body that the gateway sent."""
    sent: list[Any] = []

    class Recording(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            sent.append(json.loads(await response.aread()))
            return response

    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    await fleet.join(ServerRecord("s", "127.0.0.1:1", "torch", policy_version=2))
    async with PenstockClient(gateway.url, api_key=gateway.key, transport=Recording()) as client:
        await client.submit([PROMPT] * 2)
        [lease, _] = await queue.lease("s", 2)
        await queue.append(lease, encode_group(group_of(1, 1)), 3)
        for call, part in (
            (client.get_run(), None), (client.runs(), "runs"), (client.policies(), None), (client.policy(1), None),
            (client.compare_policies(1, 2), None), (client.servers(), "servers"), (client.metrics(), "steps"),
            (client.prompts(), None), (client.get_prompt(2), None), (client.cancel([2]), "prompts"),
            (client.groups(), None), (client.get_group(1), None), (client.promote_policy(2), None),
            (client.drain_server("s"), None), (client.pause_run(), None),
        ):  # fmt: skip
            answer: Any = await call
            plain = [a.model_dump(mode="json") for a in answer] if part else answer.model_dump(mode="json")
            assert plain == (sent[-1][part] if part else sent[-1])
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        result = await anext(client.results("0", with_groups=True))
    assert result.group is not None and result.group.trajectories[0].policy_versions == (3, 3, 4)
    with pytest.raises(ValueError, match="frozen"):
        result.group.attempt = 2  # type: ignore[misc]


async def test_a_rate_limited_call_waits_as_long_as_the_gateway_asks(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    secret, key = make_key("reader", "read")
    keys.write_text(key.line + "\n")
    pauses, responses = [], []
    now = [1000.0]  # no token comes back but by a pause of the client

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    class Recording(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            responses.append(await super().handle_async_request(request))
            return responses[-1]

    monkeypatch.setattr("penstock.client.client.sleep", sleep)
    monkeypatch.setattr("penstock_services.gateway.access.time", SimpleNamespace(monotonic=lambda: now[0]))
    config = run_config(redis_process.url, tmp_path, keys_file=keys, requests_per_s=0.5, burst_requests=1)
    async with running(config) as gateway, PenstockClient(gateway.url, api_key=secret, transport=Recording()) as client:
        await asyncio.gather(client.get_run(), client.get_run())
    asked = [float(response.headers["Retry-After"]) for response in responses if response.status_code == 429]
    assert asked and sorted(pauses) == sorted(asked)


async def test_a_wrong_prompt_is_raised_with_its_field(gateway: Gateway) -> None:
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        with pytest.raises(InvalidInput, match="num_samples") as raised:
            await client.submit([PROMPT, Prompt(messages=(("user", "?"),), num_samples=0)])
    assert raised.value.field == "prompts[1].num_samples" and raised.value.reason == "INVALID_INPUT"


async def test_a_submission_survives_a_gateway_that_is_killed(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, queue: RedisReplayQueue
) -> None:
    """The gateway is killed before it answers, and started again. The client's retry carries the same key, so no prompt
    is submitted twice."""
    config = run_config(redis_process.url, tmp_path, port=free_port(), grpc_port=free_port())
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "penstock_services.gateway", "--config", str(path)]
    config.folder.mkdir()
    processes = [start(command)]
    try:
        url, key = f"http://127.0.0.1:{config.gateway.port}", make_own_key(config.folder).read_text().strip()
        async with PenstockClient(url, api_key=key, deadline_s=200, timeout_s=20) as client:
            await client.get_run()
            submitting = [asyncio.create_task(client.submit([PROMPT] * 4)) for _ in range(20)]
            while not (await queue.stat()).pending_prompts:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            processes[0].kill()
            processes[0].wait(100)
            processes.append(start(command))
            submissions = await asyncio.gather(*submitting)
        ids = [prompt_id for submission in submissions for prompt_id in submission.prompt_ids]
        assert sorted(ids) == list(range(1, 81)) and (await queue.stat()).pending_prompts == 80
    finally:
        for process in processes:
            process.kill()
            process.wait(100)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


async def test_tls_and_client_certificates(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> None:
    make_certificate(tmp_path, "ca")
    make_certificate(tmp_path, "client", "ca")
    tls = dict(zip(("tls_cert_file", "tls_key_file"), make_certificate(tmp_path, "server", "ca"), strict=True))
    config = run_config(redis_process.url, tmp_path, **tls, tls_client_ca_file=tmp_path / "ca.crt")
    async with running(config) as gateway:
        url = f"https://127.0.0.1:{gateway.rest_port}"
        assert json.loads((config.folder / "gateway.json").read_text())["scheme"] == "https"
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as nobody:
            with pytest.raises(httpx.TransportError):
                await nobody.get(f"{url}/v1/runs")
        trusted.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
        async with PenstockClient(url, api_key=gateway.key, tls=trusted) as client:
            assert (await client.get_run()).run == "test"
        parts = [(tmp_path / name).read_bytes() for name in ("ca.crt", "client.key", "client.crt")]
        for credentials, is_known in (
            (grpc.ssl_channel_credentials(*parts), True), (grpc.ssl_channel_credentials(parts[0]), False),
        ):  # fmt: skip
            target, options = f"127.0.0.1:{gateway.grpc_port}", [("grpc.enable_http_proxy", 0)]
            async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
                metadata = (("authorization", f"Bearer {gateway.key}"),)
                call = runs_pb2_grpc.RunServiceStub(channel).GetRun(
                    runs_pb2.GetRunRequest(), timeout=100, metadata=metadata
                )
                if is_known:
                    assert (await call).run == "test"
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call
    (tmp_path / "server.key").write_text("nonsense")
    with pytest.raises(ConfigError, match="tls_key_file"):
        check(config)


async def test_commands_act_on_the_run(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, queue: RedisReplayQueue, capsys: Any
) -> None:
    def run(*words: str) -> str:
        code = cli.main(list(words))
        output = capsys.readouterr()
        assert code == 0, output.err
        return str(output.out)

    keys = tmp_path / "keys"
    secrets = {scope: tmp_path / scope for scope in ("submit", "admin")}
    for scope, path in secrets.items():
        path.write_text(run("keys", "make", "--file", str(keys), "--name", scope, "--scope", scope))
    assert run("keys", "list", "--file", str(keys)) == "submit\tsubmit\nadmin\tadmin\n"
    assert cli.main(["keys", "make", "--file", str(keys), "--name", "admin", "--scope", "read"]) == 2

    await publish(queue, 1, 2)
    resumed = policies_pb2.Policy(policy_version=3, step=2, metrics={"time": 1_790_000_000.0})
    await queue.publish(3, 2, resumed.SerializeToString())
    await Fleet(redis_client, "test").join(ServerRecord("r0", "127.0.0.1:1", "torch", policy_version=2))
    async with running(run_config(redis_process.url, tmp_path, keys_file=keys)) as gateway:
        where = ["--url", gateway.url, "--api-key-file", str(secrets["admin"])]

        def act() -> None:
            compared = run("policies", "diff", "1", "2", *where)
            assert "reward_mean" in compared and "different weights" not in compared
            assert "no metric in common" in run("policies", "diff", "2", "3", *where)
            assert "promoted" in run("policies", "promote", "3", *where)
            assert "pinned: ci" in run("policies", "pin", "1", "ci", *where)
            assert run("policies", "unpin", "ci", *where) == "unpinned\n"
            assert "retired" in run("policies", "retire", "1", *where)
            assert cli.main(["policies", "rewind", "2", *where]) == 1
            assert "no snapshot of version 2" in capsys.readouterr().err
            assert "is paused at step 2" in run("runs", "pause", *where)
            assert "is stopped at step 2, version 3: no learner is alive" in run("runs", "resume", *where)
            assert "0.2" in run("runs", "metrics", *where)
            assert "run test" in run("top", "--once", "--run", "test", *where)
            assert cli.main(["top", "--once", "--run", "nowhere", *where]) == 1
            assert "nowhere" in capsys.readouterr().err
            assert "r0" in run("servers", *where) and "drained" in run("servers", "drain", "r0", *where)
            with (
                SyncPenstockClient(gateway.url, api_key=secrets["submit"].read_text().strip()) as client,
                pytest.raises(PermissionDenied, match="needs the scope admin"),
            ):
                client.pause_run()
            with SyncPenstockClient(gateway.url, api_key=secrets["admin"].read_text().strip()) as client:
                client.cancel(client.submit([PROMPT]).prompt_ids)
            assert "prompt 1  CANCELLED" in run("watch", "--cursor", "0", "--limit", "1", *where)

        await asyncio.to_thread(act)


async def test_both_clients_speak_to_it(gateway: Gateway) -> None:
    prompt = Prompt(token_ids=(1, 2), ground_truth="4", num_samples=2)
    async with PenstockClient.from_run_dir(gateway.config.folder) as client:
        submission = await client.submit([prompt, prompt])
        assert len(submission.prompt_ids) == 2 and not submission.replayed
        record = await client.get_prompt(submission.prompt_ids[0])
        assert record.prompt is not None
        assert record.prompt.token_ids == (1, 2) and record.prompt.ground_truth == "4"
        assert (await client.policies()).policies == () and await client.servers() == []
        with pytest.raises(NotFound):
            await client.get_group(1)
        with pytest.raises(InvalidInput, match=r"^prompts\[0\]\.num_samples: must be") as caught:
            await client.submit([Prompt(token_ids=(1,), num_samples=0)])
        assert caught.value.field == "prompts[0].num_samples"

    def synchronously() -> Run:
        with SyncPenstockClient.from_run_dir(gateway.config.folder) as client:
            return client.get_run()

    assert (await asyncio.to_thread(synchronously)).queue.pending_prompts == 2


async def test_a_client_waits_for_the_first_policy_and_for_a_version(gateway: Gateway, queue: RedisReplayQueue) -> None:
    async with PenstockClient.from_run_dir(gateway.config.folder) as client:
        with pytest.raises(DeadlineExceeded, match="the run has no policy after 0 s"):
            await client.wait_for_policy(timeout_s=0)
        waiting = asyncio.create_task(client.wait_for_policy(timeout_s=100))
        await asyncio.sleep(0)
        await publish(queue, 0)
        assert (await waiting).policy_version == 0
        with pytest.raises(DeadlineExceeded, match="version 0 is the latest"):
            await client.wait_for_policy(timeout_s=0, version=1)
