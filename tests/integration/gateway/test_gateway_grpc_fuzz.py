"""Random and damaged bytes to every gRPC method of the gateway: it never fails, and nothing is half accepted."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import PolicyRegistry, RunControl
from penstock.store.keys import RunKeys
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
from support.fuzzing import answer_of, damaged_requests, methods_of, path_of, whole_request
from support.gateways import Gateway, publish

CONTRACTS = (
    datasets_pb2, generate_pb2, groups_pb2, policies_pb2, prompts_pb2, runs_pb2, sessions_pb2, tasks_pb2, health_pb2,
    reflection_pb2,
)  # fmt: skip
FAULTS_OF_THE_GATEWAY = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
WAITS = ("WatchResults", "WatchPolicies", "WaitPrompt", "Watch", "Generate")
"""These may take as long as the client wants."""
PROMPT = prompts_pb2.Prompt(
    messages=[prompts_pb2.Message(role="user", content="2+2?")],
    sampling=prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=8),
    num_samples=2,
)
WHOLE = {
    "SubmitPromptsRequest": prompts_pb2.SubmitPromptsRequest(prompts=[PROMPT, PROMPT]),
    "CreateEvaluationRequest": runs_pb2.CreateEvaluationRequest(evaluation_id="e", prompts=[PROMPT]),
    "UploadDatasetRequest": datasets_pb2.UploadDatasetRequest(
        name="d", format="jsonl", content=b'{"prompt": "a"}\n{"prompt": "b"}\n'
    ),
    "SubmitDatasetRequest": datasets_pb2.SubmitDatasetRequest(
        name="d", num_samples=1, sampling=prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=8)
    ),
}


class State:
    """What calls of clients can change."""

    def __init__(self, gateway: Gateway, queue: RedisReplayQueue) -> None:
        self.queue = queue
        self.client: Any = queue.client
        self.folder = gateway.config.folder / "datasets"

    async def read(self) -> tuple[Any, ...]:
        keys = RunKeys("test")
        return (
            await self.queue.stat(),
            await self.client.hget(keys.counters, "next_prompt_id"),
            await RunControl(self.client, "test").orders(),
            await PolicyRegistry(self.client, "test").pins(),
            await self.client.smembers(keys.retired_versions),
            await self.client.smembers(keys.drained),
            await self.client.hgetall(keys.feeds),
            sorted(await self.client.keys(keys.evaluation("*"))),
            sorted(path.name for path in self.folder.glob("*")),
        )


@pytest.mark.parametrize("num_examples", [4, pytest.param(300, marks=pytest.mark.long)])
async def test_damaged_requests_are_refused_whole(gateway: Gateway, queue: RedisReplayQueue, num_examples: int) -> None:
    await publish(queue, 1, 2)
    state = State(gateway, queue)
    key = (("authorization", f"Bearer {gateway.key}"),)
    target = f"127.0.0.1:{gateway.grpc_port}"
    num_ok = 0
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method in (method for contract in CONTRACTS for method in methods_of(contract)):
            timeout_s = 0.1 if method.name in WAITS else 100.0
            for data in damaged_requests(whole_request(method, WHOLE), num_examples):
                before = await state.read()
                code, details = await answer_of(channel, method, data, key, timeout_s)
                assert code not in FAULTS_OF_THE_GATEWAY, (path_of(method), data, details)
                assert code != grpc.StatusCode.DEADLINE_EXCEEDED or method.name in WAITS, (path_of(method), data)
                num_ok += code == grpc.StatusCode.OK
                if code != grpc.StatusCode.OK:
                    assert await state.read() == before, (path_of(method), data, code, details)
    assert num_ok > 20, "whole requests are accepted"
    assert (await queue.stat()).conservation_error == 0
    assert (await gateway.rest.get("/readyz")).status_code == 200
    assert not gateway.task.done()
