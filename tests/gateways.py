"""A gateway on real ports for tests, with prompts, groups and policies to use with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

from penstock.api_keys import read_own_key
from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import GatewayConfig, RedisConfig
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment
from penstock.v1 import policies_pb2
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
    await asyncio.wait([task, ready], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    host, rest_port, grpc_port = ready.result()
    key = read_own_key(config.folder)
    headers, senders = ({"Authorization": f"Bearer {key}"}, KeySender.interceptors(key)) if key else ({}, [])
    async with (
        httpx.AsyncClient(base_url=f"http://{host}:{rest_port}", timeout=20, trust_env=False, headers=headers) as rest,
        grpc.aio.insecure_channel(
            f"{host}:{grpc_port}", options=[("grpc.enable_http_proxy", 0)], interceptors=senders
        ) as channel,
    ):
        yield Gateway(config, rest, channel, rest_port, grpc_port, stop, task)
    stop.set()
    async with asyncio.timeout(20):
        await task


def run_config(redis_url: str, folder: Path, **gateway: Any) -> RunConfig:
    return RunConfig(
        run="test",
        run_dir=folder,
        model=ModelConfig(path=folder),
        redis=RedisConfig(url=redis_url),
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
