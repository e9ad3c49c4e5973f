"""Calls to a gateway by REST and by gRPC, and a comparison of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from gateways import RUN, Gateway
from penstock.v1 import groups_pb2_grpc, policies_pb2_grpc, prompts_pb2_grpc, runs_pb2_grpc


def stubs(gateway: Gateway) -> tuple[Any, Any, Any, Any]:
    return (
        prompts_pb2_grpc.PromptServiceStub(gateway.channel),
        groups_pb2_grpc.GroupServiceStub(gateway.channel),
        policies_pb2_grpc.PolicyServiceStub(gateway.channel),
        runs_pb2_grpc.RunServiceStub(gateway.channel),
    )


async def rest(gateway: Gateway, method: str, path: str, **options: Any) -> Any:
    response = await gateway.rest.request(method, path, **options)
    assert response.status_code == 200, response.text
    return response.json()


async def both(
    gateway: Gateway, method: str, path: str, answer: Any, to_json: Callable[[Any], Any], **options: Any
) -> Any:
    """Make the call by REST, and compare the answer with the one by gRPC. Ages may differ."""
    by_rest, by_grpc = await rest(gateway, method, path, **options), to_json(await answer)
    assert ageless(by_grpc) == ageless(by_rest), path
    return by_rest


def ageless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: ageless(part) for name, part in value.items() if name != "heartbeat_age_ms"}
    return [ageless(part) for part in value] if isinstance(value, list) else value


async def submit(gateway: Gateway, *prompts: dict[str, Any]) -> list[int]:
    return list((await rest(gateway, "POST", f"{RUN}/prompts", json={"prompts": list(prompts)}))["prompt_ids"])


async def read_events(response: httpx.Response, count: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                cursor = line.removeprefix("id: ")
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")) | {"event_id": cursor})
            if len(events) == count:
                return events
    raise AssertionError(f"the stream ended after {events}")


async def post_prompts(gateway: Gateway, *prompts: dict[str, Any], **body: Any) -> httpx.Response:
    """Submit prompts and return the response, whatever it is."""
    return await gateway.rest.post(f"{RUN}/prompts", json={"prompts": list(prompts), **body})


def assert_problem(response: httpx.Response, status: int, reason: str, field: str = "") -> str:
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = response.json()
    assert (problem["status"], problem["reason"], problem["field"]) == (status, reason, field), problem
    assert response.status_code == status and problem["type"] and problem["title"]
    return str(problem["detail"])
