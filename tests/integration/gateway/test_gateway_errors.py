"""Wrong requests and failures: what REST and gRPC answer, and that nothing is half accepted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis

from penstock.api.conversion import request_of
from penstock.config.run import RunConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.v1 import (
    prompts_pb2,
    prompts_pb2_grpc,
)
from penstock_services.gateway.prompts import SubmitPrompts
from support.gateways import PROMPT, RUN, Gateway, assert_problem, post_prompts, run_config, running


@pytest.fixture
def configure(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda **gateway: run_config(redis_process.url, tmp_path, **gateway)


@pytest.fixture
async def gateway(configure: Callable[..., RunConfig]) -> AsyncIterator[Gateway]:
    async with running(configure(max_body_bytes=64 * 1024, max_prompts_per_request=8)) as started:
        yield started


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
        ({"sampling": {"top_j": 1}}, "prompts[1].sampling.top_j"),
        ({"extra_info": [1]}, "prompts[1].extra_info"),
        ({"priority": 10**6}, "prompts[1].priority"),
        ({"colour": "red"}, "prompts[1].colour"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_accepted(
    gateway: Gateway, queue: RedisReplayQueue, change: dict[str, Any], field: str
) -> None:
    assert_problem(await post_prompts(gateway, PROMPT, PROMPT | change), 400, "INVALID_INPUT", field)
    assert (await queue.stat()).pending_prompts == 0


async def test_bodies_that_are_not_a_request(gateway: Gateway) -> None:
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
    assert_problem(await post_prompts(gateway), 400, "INVALID_INPUT", "prompts")
    assert_problem(await post_prompts(gateway, *[PROMPT] * 9), 400, "INVALID_INPUT", "prompts")
    assert_problem(
        await post_prompts(gateway, PROMPT, idempotency_key="k" * 257), 400, "INVALID_INPUT", "idempotency_key"
    )


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
    unknown = (await gateway.rest.post("/v1/embeddings", json={})).json()["error"]["message"]
    assert unknown == "there is no /v1/embeddings here; /docs lists the paths of this gateway"
    refused = (await gateway.rest.delete(RUN)).json()["error"]["message"]
    assert refused == f"{RUN} does not take DELETE; /docs lists the methods of each path"
    assert_problem(await gateway.rest.get(f"{RUN}/policies/newest"), 400, "INVALID_INPUT", "policy_version")
    assert_problem(await gateway.rest.get(f"{RUN}/prompts/x"), 400, "INVALID_INPUT", "prompt_id")


async def test_a_body_over_the_limit_is_413_chunked_or_not(gateway: Gateway) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    for content in (b" " * 70 * 1024, chunks()):
        response = await gateway.rest.post(f"{RUN}/prompts", content=content)
        assert_problem(response, 413, "BODY_TOO_LARGE")


async def test_a_failure_that_no_one_expected_is_not_shown(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(RedisReplayQueue, "submit_many", fail)
    response = await post_prompts(gateway, PROMPT)
    assert_problem(response, 500, "INTERNAL")
    assert "secret" not in response.text
    stub = prompts_pb2_grpc.PromptServiceStub(gateway.channel)
    request = request_of(prompts_pb2.SubmitPromptsRequest, SubmitPrompts.model_validate({"prompts": [PROMPT]}))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.SubmitPrompts(request)
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(raised.value)
    text = (await gateway.rest.get("/metrics")).text
    assert 'penstock_gateway_requests_total{code="INTERNAL",protocol="rest",route="/v1/runs/{run}/prompts"} 1.0' in text
