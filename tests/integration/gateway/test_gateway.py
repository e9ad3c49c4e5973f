"""The gateway on real ports over a real Redis: REST and gRPC, the client, errors, access and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis

from gateways import PROMPT, RUN, Gateway, group_of, publish, run_config, running
from penstock.client import PenstockClient, SyncPenstockClient
from penstock.client.responses import Run
from penstock.codec import encode_group
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded, InvalidInput, NotFound, Unauthenticated, Unavailable
from penstock.ports import free_port
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.trajectory import Prompt
from penstock.v1 import (
    groups_pb2,
    groups_pb2_grpc,
    policies_pb2,
    policies_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway.policies import bodies as policy_bodies
from penstock_services.gateway.prompts import bodies as prompt_bodies
from penstock_services.gateway.runs import bodies as run_bodies
from penstock_services.gateway.server import serve


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda **gateway: run_config(redis_process.url, tmp_path, **gateway)


@pytest.fixture
async def gateway(configure: Callable[..., RunConfig]) -> AsyncIterator[Gateway]:
    async with running(configure(max_body_bytes=64 * 1024, max_prompts_per_request=8)) as started:
        yield started


async def post(gateway: Gateway, *prompts: dict[str, Any], **body: Any) -> httpx.Response:
    return await gateway.rest.post(f"{RUN}/prompts", json={"prompts": list(prompts), **body})


async def get(gateway: Gateway, path: str) -> Any:
    response = await gateway.rest.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def assert_problem(response: httpx.Response, status: int, reason: str, field: str = "") -> str:
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = response.json()
    assert (problem["status"], problem["reason"], problem["field"]) == (status, reason, field), problem
    assert response.status_code == status and problem["type"] and problem["title"]
    return str(problem["detail"])


async def test_rest_and_grpc_give_the_same_answers(gateway: Gateway, queue: RedisReplayQueue) -> None:
    submitted = (await post(gateway, PROMPT, PROMPT, idempotency_key="a")).json()
    assert submitted == {"prompt_ids": [1, 2], "replayed": False}
    prompt_service = prompts_pb2_grpc.PromptServiceStub(gateway.channel)
    body = prompts_pb2.Prompt()
    prompt_bodies.PromptBody.model_validate(PROMPT).fill(body)
    again = await prompt_service.SubmitPrompts(
        prompts_pb2.SubmitPromptsRequest(run="test", idempotency_key="a", prompts=[body] * 2)
    )
    assert prompt_bodies.submission_to_json(again) == submitted | {"replayed": True}

    record = await get(gateway, f"{RUN}/prompts/1")
    assert record["state"] == "PENDING"
    assert record["prompt"]["sampling"] == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 16, "seed": 3}
    for name in ("messages", "num_samples", "data_source", "ground_truth", "extra_info"):
        assert record["prompt"][name] == PROMPT[name]
    answer = await prompt_service.GetPrompt(prompts_pb2.GetPromptRequest(prompt_id=1))
    assert prompt_bodies.prompt_record_to_json(answer) == record

    [lease, _] = await queue.lease("s", 2)
    await queue.append(lease, encode_group(group_of(1, lease.attempt)), 3)
    group = await get(gateway, f"{RUN}/groups/1")
    assert group["trajectories"] == [
        {
            "token_ids": [5, 6, 7],
            "loss_mask": [1, 0, 1],
            "log_probs": [-0.5, 0.0, -0.25],
            "policy_versions": [3, 3, 4],
            "reward": 1.0,
            "reward_parts": {"format": None},
            "finish_reason": "stop",
            "is_baseline": False,
            "text": "",
            "tokens": [],
            "learner_log_probs": [],
        }
    ]
    answer = await groups_pb2_grpc.GroupServiceStub(gateway.channel).GetGroup(groups_pb2.GetGroupRequest(prompt_id=1))
    assert prompt_bodies.group_to_json(answer) == group


async def test_the_run_its_policies_and_its_servers(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await post(gateway, PROMPT)
    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    for server_id, state, version in (("a", "READY", 2), ("b", "LOADING", 1), ("c", "STALE", 2)):
        record = ServerRecord(server_id, "127.0.0.1:1", "torch", policy_version=version, weights_digest=f"d{version}")
        await fleet.join(record)
        await fleet.set_state(server_id, state)  # type: ignore[arg-type]

    run = await get(gateway, RUN)
    assert (run["run"], run["step"], run["policy_version"], run["metrics"]) == ("test", 2, 2, {"reward_mean": 0.2})
    assert (run["queue"]["pending_prompts"], run["queue"]["conservation_error"]) == (1, 0)
    assert [server["state"] for server in run["servers"]] == ["READY", "LOADING", "STALE"]
    latest = await get(gateway, f"{RUN}/policies/latest")
    assert (latest["policy_version"], latest["server_ids"]) == (2, ["a"])
    assert (await get(gateway, f"{RUN}/policies/1"))["server_ids"] == ["b"]
    servers = await get(gateway, f"{RUN}/servers")
    assert {(server["policy_version"], server["weights_digest"]) for server in servers["servers"]} >= {
        (2, "d2"),
        (1, "d1"),
    }

    run_service = runs_pb2_grpc.RunServiceStub(gateway.channel)
    policy_service = policies_pb2_grpc.PolicyServiceStub(gateway.channel)
    answer = run_bodies.run_to_json(await run_service.GetRun(runs_pb2.GetRunRequest()))
    assert without_ages(answer) == without_ages(run)
    answer = run_bodies.servers_to_json(await run_service.ListServers(runs_pb2.ListServersRequest()))
    assert without_ages(answer) == without_ages(servers)
    answer = await policy_service.GetPolicy(policies_pb2.GetPolicyRequest())
    assert policy_bodies.policy_to_json(answer) == latest
    answer = await policy_service.ListPolicies(policies_pb2.ListPoliciesRequest())
    assert policy_bodies.policies_to_json(answer) == await get(gateway, f"{RUN}/policies")


def without_ages(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"servers": [server | {"heartbeat_age_ms": 0} for server in answer["servers"]]}


async def test_policies_are_paged_newest_first(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await publish(queue, 1, 2, 3, 4, 5)
    pages, token = [], ""
    while True:
        page = await get(gateway, f"{RUN}/policies?page_size=2&page_token={token}")
        pages.append([policy["policy_version"] for policy in page["policies"]])
        token = page["next_page_token"]
        if not token:
            break
    assert pages == [[5, 4], [3, 2], [1]]
    for query, field in (("page_token=nonsense", "page_token"), ("page_size=-1", "page_size")):
        assert_problem(await gateway.rest.get(f"{RUN}/policies?{query}"), 400, "INVALID_INPUT", field)


async def test_an_evaluation_from_creation_to_score(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts = [Prompt(messages=(("user", f"{i}?"),), num_samples=2) for i in range(2)]
    async with PenstockClient(gateway.url) as client:
        created = await client.create_evaluation("heldout", prompts)
        assert (created.num_prompts, created.num_finished) == (2, 0)
        assert await client.create_evaluation("heldout", prompts[:1]) == created
        with pytest.raises(DeadlineExceeded, match="0 of 2 prompts"):
            await client.wait_for_evaluation("heldout", timeout_s=0)
        for lease in await queue.lease("s", 2):
            assert prompts_pb2.Prompt.FromString(lease.payload).evaluation_id == "heldout"
            await queue.record_evaluation("heldout", lease, [1.0, 0.0], 3, 4)
        finished = await client.wait_for_evaluation("heldout", timeout_s=20)
    assert (finished.score, finished.policy_version_min, finished.policy_version_max) == (0.5, 3, 4)
    assert (finished.num_samples, finished.pass_at) == (4, {1: 0.5, 2: 1.0})
    answer = await runs_pb2_grpc.RunServiceStub(gateway.channel).GetEvaluation(
        runs_pb2.GetEvaluationRequest(evaluation_id="heldout")
    )
    assert run_bodies.evaluation_to_json(answer) == await get(gateway, f"{RUN}/evaluations/heldout")


async def test_repeating_a_submission_changes_nothing(gateway: Gateway, queue: RedisReplayQueue) -> None:
    first = (await post(gateway, PROMPT, idempotency_key="k")).json()
    body = {"prompts": [PROMPT]}
    again = await gateway.rest.post(f"{RUN}/prompts", json=body, headers={"Idempotency-Key": "k"})
    assert again.json() == first | {"replayed": True}
    assert (await queue.stat()).pending_prompts == 1
    assert_problem(await post(gateway, PROMPT, PROMPT, idempotency_key="k"), 400, "INVALID_INPUT", "idempotency_key")
    body |= {"idempotency_key": "other"}
    differing = await gateway.rest.post(f"{RUN}/prompts", json=body, headers={"Idempotency-Key": "k"})
    assert_problem(differing, 400, "INVALID_INPUT", "idempotency_key")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_samples": 0}, "prompts[1].num_samples"),
        ({"num_samples": 1025}, "prompts[1].num_samples"),
        ({"num_samples": "many"}, "prompts[1].num_samples"),
        ({"messages": []}, "prompts[1]"),
        ({"token_ids": [1]}, "prompts[1]"),
        ({"messages": [{"role": " ", "content": ""}]}, "prompts[1].messages[0].role"),
        ({"sampling": {"temperature": -1}}, "prompts[1].sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "prompts[1].sampling.top_p"),
        ({"sampling": {"max_tokens": 0}}, "prompts[1].sampling.max_tokens"),
        ({"sampling": {"top_k": 1}}, "prompts[1].sampling.top_k"),
        ({"extra_info": [1]}, "prompts[1].extra_info"),
        ({"priority": 10**6}, "prompts[1].priority"),
        ({"colour": "red"}, "prompts[1].colour"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_accepted(
    gateway: Gateway, queue: RedisReplayQueue, change: dict[str, Any], field: str
) -> None:
    assert_problem(await post(gateway, PROMPT, PROMPT | change), 400, "INVALID_INPUT", field)
    assert (await queue.stat()).pending_prompts == 0


async def test_bodies_that_are_no_request(gateway: Gateway) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"{", b"[]", b"", b'{"prompts": ' + b"[" * 5000):
        response = await gateway.rest.post(f"{RUN}/prompts", content=content, headers=headers)
        assert response.status_code == 400 and response.json()["detail"]
    nan = await gateway.rest.post(
        f"{RUN}/prompts",
        content=json.dumps({"prompts": [PROMPT | {"ground_truth": float("nan")}]}),
        headers=headers,
    )
    assert_problem(nan, 400, "INVALID_INPUT", "prompts[0].ground_truth")
    assert_problem(await post(gateway), 400, "INVALID_INPUT", "prompts")
    assert_problem(await post(gateway, *[PROMPT] * 9), 400, "INVALID_INPUT", "prompts")
    assert_problem(await post(gateway, PROMPT, idempotency_key="k" * 257), 400, "INVALID_INPUT", "idempotency_key")


async def test_grpc_errors_carry_code_reason_and_field(gateway: Gateway) -> None:
    prompts = prompts_pb2_grpc.PromptServiceStub(gateway.channel)
    bad = prompts_pb2.Prompt(messages=[prompts_pb2.Message(role="user")], num_samples=1, extra_info_json="[]")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prompts.SubmitPrompts(prompts_pb2.SubmitPromptsRequest(prompts=[bad]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(caught.value) == {"reason": "INVALID_INPUT", "field": "prompts[0].extra_info_json"}
    with pytest.raises(grpc.aio.AioRpcError, match="serves 'test'") as caught:
        await prompts.GetPrompt(prompts_pb2.GetPromptRequest(run="other", prompt_id=1))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert trailing(caught.value) == {"reason": "NOT_FOUND"}


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return {name: value for name, value in error.trailing_metadata() if name in ("reason", "field")}


async def test_what_does_not_exist_is_404(gateway: Gateway) -> None:
    paths = [
        "/v1/runs/other", f"{RUN}/prompts/7", f"{RUN}/prompts/{2**40}", f"{RUN}/groups/7", f"{RUN}/policies/latest",
        f"{RUN}/policies/3", f"{RUN}/evaluations/none", "/v2",
    ]  # fmt: skip
    for path in paths:
        assert_problem(await gateway.rest.get(path), 404, "NOT_FOUND")
    assert_problem(await gateway.rest.delete(RUN), 405, "METHOD_NOT_ALLOWED")
    assert_problem(await gateway.rest.get(f"{RUN}/policies/newest"), 400, "INVALID_INPUT", "policy_version")
    assert_problem(await gateway.rest.get(f"{RUN}/prompts/x"), 400, "INVALID_INPUT", "prompt_id")


async def test_a_body_over_the_limit_is_413_chunked_or_not(gateway: Gateway) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    for content in (b" " * 70 * 1024, chunks()):
        response = await gateway.rest.post(f"{RUN}/prompts", content=content)
        assert_problem(response, 413, "BODY_TOO_LARGE")


async def test_metrics_count_requests_and_show_the_queue(gateway: Gateway) -> None:
    await post(gateway, PROMPT)
    await gateway.rest.get(f"{RUN}/prompts/9")
    await runs_pb2_grpc.RunServiceStub(gateway.channel).GetRun(runs_pb2.GetRunRequest())
    text, took = (await gateway.rest.get("/metrics")).text, "penstock_gateway_request_duration_seconds"
    for line in (
        'penstock_gateway_requests_total{code="200",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        'penstock_gateway_requests_total{code="404",protocol="rest",route="/v1/runs/{run}/prompts/{prompt_id}"} 1.0',
        'penstock_gateway_requests_total{code="OK",protocol="grpc",route="/penstock.v1.RunService/GetRun"} 1.0',
        'penstock_gateway_inflight_requests{protocol="rest"} 1.0',
        'penstock_gateway_inflight_requests{protocol="grpc"} 0.0',
        took + '_bucket{le="+Inf",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        took + '_count{protocol="rest",route="/v1/runs/{run}/prompts"} 1.0',
        'penstock_queue_depth{queue="prompts"} 1.0',
        'penstock_queue_bytes{queue="groups"} 0.0',
        "penstock_conservation_error 0.0",
        "penstock_trained_total 0.0",
        'penstock_rollout_servers{state="READY"} 0.0',
    ):
        assert line in text.splitlines(), text


async def test_a_failure_that_nobody_expected_is_not_shown(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(RedisReplayQueue, "submit_many", fail)
    response = await post(gateway, PROMPT)
    assert_problem(response, 500, "INTERNAL")
    assert "secret" not in response.text
    stub = prompts_pb2_grpc.PromptServiceStub(gateway.channel)
    request = prompt_bodies.SubmitPromptsBody.model_validate({"prompts": [PROMPT]}).to_proto("", "")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.SubmitPrompts(request)
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(raised.value)
    text = (await gateway.rest.get("/metrics")).text
    assert 'penstock_gateway_requests_total{code="INTERNAL",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0' in text


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


@pytest.mark.parametrize("setting", ["port", "grpc_port"])
async def test_a_port_in_use_is_one_clear_line(configure: Callable[..., RunConfig], setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = f"port {port} on 127.0.0.1 is in use; set gateway.{setting} to a free one or 0"
        with pytest.raises(Unavailable, match=f"^{expected}$"):
            await serve(configure(**{setting: port}))


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


async def test_without_redis_it_lives_but_is_not_ready(tmp_path: Path) -> None:
    async with running(run_config(f"redis://127.0.0.1:{free_port()}/0", tmp_path)) as gateway:
        assert (await gateway.rest.get("/healthz")).status_code == 200
        assert_problem(await gateway.rest.get("/readyz"), 503, "UNAVAILABLE")
        for path in (RUN, f"{RUN}/policies", f"{RUN}/servers"):
            assert_problem(await gateway.rest.get(path), 503, "UNAVAILABLE")
        text = (await gateway.rest.get("/metrics")).text
        assert "penstock_gateway_requests_total" in text and "penstock_queue_depth" not in text
        async with PenstockClient(gateway.url, deadline_s=0.5) as client:
            with pytest.raises(Unavailable, match="Redis does not answer"):
                await client.get_run()


async def test_sigterm_lets_a_request_in_flight_finish(gateway: Gateway) -> None:
    address = gateway.config.folder / "gateway.json"
    assert json.loads(address.read_text()) == {
        "host": "127.0.0.1",
        "rest_port": gateway.rest_port,
        "grpc_port": gateway.grpc_port,
        "pid": os.getpid(),
        "scheme": "http",
    }
    stopped = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        content = json.dumps({"prompts": [PROMPT]}).encode()
        yield content[:20]
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await gateway.stop.wait()
        stopped.set()
        yield content[20:]

    response = await gateway.rest.post(f"{RUN}/prompts", content=body(), headers={"Content-Type": "application/json"})
    assert stopped.is_set() and response.json()["prompt_ids"] == [1]
    async with asyncio.timeout(20):
        await gateway.task
    assert not address.exists()
