"""A gateway on real ports, calls to it by REST and gRPC, and programs that use it: a browser, workers of examples/."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from pydantic import BaseModel

from penstock.api.conversion import to_json
from penstock.api_keys import read_own_key
from penstock.cancellation import end_task
from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import GatewayConfig, RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment
from penstock.v1 import groups_pb2_grpc, policies_pb2, policies_pb2_grpc, prompts_pb2_grpc, runs_pb2_grpc
from penstock_services.gateway.server import serve

RUN = "/v1/runs/test"
PROMPT = {
    "messages": [{"role": "user", "content": "2+2?"}],
    "sampling": {"temperature": 0.7, "max_tokens": 16, "seed": 3},
    "num_samples": 2,
    "data_source": "gsm8k",
    "ground_truth": {"answer": 4},
    "extra_info": {"index": 1},
}


@dataclass
class Gateway:
    config: RunConfig
    rest: httpx.AsyncClient
    channel: grpc.aio.Channel
    rest_port: int
    grpc_port: int
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.rest_port}"

    @property
    def key(self) -> str:
        """The key that the gateway has made for itself. `rest` and `channel` send it."""
        return read_own_key(self.config.folder)


class KeySender:
    """Adds a key to the metadata of calls that have none. grpc wants an object for each kind of call."""

    def __init__(self, key: str) -> None:
        self.key = key

    async def send(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = list(details.metadata or ())
        if not any(name == "authorization" for name, _ in metadata):
            metadata.append(("authorization", f"Bearer {self.key}"))
        return await continuation(details._replace(metadata=grpc.aio.Metadata(*metadata)), request)

    @classmethod
    def interceptors(cls, key: str) -> list[grpc.aio.ClientInterceptor]:
        kinds = {
            "intercept_unary_unary": grpc.aio.UnaryUnaryClientInterceptor,
            "intercept_unary_stream": grpc.aio.UnaryStreamClientInterceptor,
            "intercept_stream_stream": grpc.aio.StreamStreamClientInterceptor,
        }
        return [type(name, (cls, kind), {name: cls.send})(key) for name, kind in kinds.items()]


@asynccontextmanager
async def running(config: RunConfig) -> AsyncIterator[Gateway]:
    ready: asyncio.Future[tuple[str, int, int]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(config, lambda *address: ready.set_result(address), stop))
    await asyncio.wait([task, ready], timeout=120, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    host, rest_port, grpc_port = ready.result()
    key = read_own_key(config.folder)
    headers, senders = ({"Authorization": f"Bearer {key}"}, KeySender.interceptors(key)) if key else ({}, [])
    plain: dict[str, Any] = {"trust_env": False, "verify": False}  # there is no TLS, and reading authorities takes long
    async with (
        httpx.AsyncClient(base_url=f"http://{host}:{rest_port}", timeout=60, headers=headers, **plain) as rest,
        grpc.aio.insecure_channel(
            f"{host}:{grpc_port}", options=[("grpc.enable_http_proxy", 0)], interceptors=senders
        ) as channel,
    ):
        yield Gateway(config, rest, channel, rest_port, grpc_port, stop, task)
    stop.set()
    if not (await asyncio.wait({task}, timeout=60))[0]:
        pending = "\n".join(sorted(waiting_at(each) for each in asyncio.all_tasks()))
        await end_task(task)
        raise TimeoutError(f"the gateway has not ended 60 s after it was told to stop; pending tasks:\n{pending}")
    await task


def waiting_at(task: asyncio.Task[Any]) -> str:
    """The task's name and the lines at which it waits, the innermost last."""
    places, awaited = [], task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = getattr(awaited, "cr_await", None)
    return f"{task.get_name()}: {' > '.join(places)} > {awaited!r}"


SILENCE_S = 600.0
"""How long a server, the learner or the holder of a lease may be silent before it counts as dead. Most tests send no
heartbeats, and on a busy machine a test takes minutes."""
REDIS_S = 60.0


def run_config(redis_url: str, folder: Path, **gateway: Any) -> RunConfig:
    return RunConfig(
        run="test",
        run_dir=folder,
        model=ModelConfig(path=folder),
        redis=RedisConfig(url=redis_url, timeout_s=REDIS_S),
        replay=ReplayConfig(lease_ttl_s=SILENCE_S),
        gateway=GatewayConfig(**gateway),
    )


def group_of(prompt_id: int, attempt: int) -> Group:
    trajectory = Trajectory(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=np.array([1, 0, 1], dtype=np.uint8),
        log_probs=np.array([-0.5, 0.0, -0.25], dtype=np.float32),
        segments=(VersionSegment(0, 2, 3), VersionSegment(2, 3, 4)),
        reward=1.0,
        reward_parts={"format": float("nan")},
    )
    return Group("test", prompt_id, attempt, "s", "gsm8k", Sampling(), np.array([1, 2], dtype=np.int32), (trajectory,))


async def publish(queue: RedisReplayQueue, *versions: int) -> None:
    await queue.take_term(0)
    for version in versions:
        policy = policies_pb2.Policy(
            policy_version=version, step=version, weights_digest="ab", state=policies_pb2.Policy.PUBLISHED,
            metrics={"reward_mean": version / 10},
        )  # fmt: skip
        await queue.publish(version, version, policy.SerializeToString())


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


def as_json(record: type[BaseModel]) -> Callable[[Any], Any]:
    """Converts messages of gRPC to what REST answers."""
    return lambda message: to_json(message, record)


def ageless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: ageless(part) for name, part in value.items() if name != "heartbeat_age_ms"}
    return [ageless(part) for part in value] if isinstance(value, list) else value


async def submit(gateway: Gateway, *prompts: dict[str, Any]) -> list[int]:
    return list((await rest(gateway, "POST", f"{RUN}/prompts", json={"prompts": list(prompts)}))["prompt_ids"])


async def read_events(lines: AsyncIterator[str], count: int) -> list[dict[str, Any]]:
    """The next events of a stream, of whose response these are the lines."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(100):
        async for line in lines:
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


CHROMIUM = Path("/usr/bin/chromium")
LAUNCH: dict[str, Any] = {
    "executable_path": str(CHROMIUM), "args": ["--no-sandbox", "--disable-gpu"], "timeout": 180_000,
}  # fmt: skip
"""Without a GPU, Chromium would emulate one. On a busy machine it may need minutes to start."""
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: apt-get install chromium")
SCREENSHOTS = os.environ.get("PENSTOCK_SCREENSHOTS")
"""A folder in which to keep screenshots."""


ROOT = Path(__file__).parents[2]
DEADLINE_S = 150


async def run_worker(package: str, script: str, *arguments: str, gateway: Gateway, log: Path) -> str:
    """Run a worker of examples/ until there are no tasks. Returns what it printed.

    PENSTOCK_<PACKAGE>_PYTHON names a Python that has the package; without it the test is skipped."""
    variable = f"PENSTOCK_{package.upper()}_PYTHON"
    python = os.environ.get(variable, sys.executable)
    found = await asyncio.to_thread(
        subprocess.run, [python, "-c", f"import {package}"], capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"needs {package}; set {variable} to a Python that has it")
    with log.open("w") as output:
        worker = await asyncio.create_subprocess_exec(
            python, f"examples/{script}", *arguments, "--url", gateway.url, "--idle-s", "1", cwd=ROOT,
            env=os.environ | {"PENSTOCK_API_KEY": gateway.key, "PYTHONPATH": str(ROOT)},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    waiting = asyncio.create_task(worker.wait())
    try:
        await asyncio.wait({waiting}, timeout=DEADLINE_S)
    finally:
        if worker.returncode is None:
            worker.kill()
        await waiting
    return log.read_text()
