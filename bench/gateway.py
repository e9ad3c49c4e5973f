"""Compares the gateway with a bare FastAPI echo and a bare grpc.aio echo, with the same bodies, at 64 connections.

    make bench-gateway

Every server is a separate process. This process makes the calls of both protocols. The echoes parse the body and send
it back, without checks, keys, metrics or Redis. A round sends NUM_REQUESTS to each contender in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from harness import (
    Bar,
    Measurement,
    alternate,
    gateway_process,
    listening,
    make_parser,
    median_ratio,
    redis_process,
    report,
    sized,
)
from penstock.api.conversion import request_of
from penstock.api.records import SubmittedPrompt
from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import GatewayConfig, RedisConfig
from penstock.machine import free_port
from penstock.v1 import prompts_pb2

CONNECTIONS = 64
NUM_REQUESTS = sized(2_000, 64)
NUM_ROUNDS = sized(7, 1)
BATCH = 256
NUM_BATCHES = sized(96, 8)
BATCH_CONNECTIONS = 8
KEY = "a-key-for-the-benchmark"
"""Sent to every contender; only the gateway checks it."""
METHOD = "/penstock.v1.PromptService/SubmitPrompts"
PROMPT = {
    "messages": [{"role": "user", "content": "What is 17 + 25? Think step by step, then give the number."}],
    "sampling": {"temperature": 0.7, "top_p": 1.0, "max_tokens": 64},
    "num_samples": 8,
    "data_source": "arithmetic",
    "ground_truth": "42",
}

ECHO_REST = """
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
app = FastAPI()
@app.post("/v1/runs/-/prompts")
async def echo(request: Request):
    return JSONResponse(await request.json())
uvicorn.run(app, host="127.0.0.1", port={port}, log_level="error", access_log=False)
"""
ECHO_GRPC = """
import asyncio, grpc
from penstock.v1 import prompts_pb2
async def echo(request, context):
    return request
async def main():
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        echo, request_deserializer=prompts_pb2.SubmitPromptsRequest.FromString,
        response_serializer=prompts_pb2.SubmitPromptsRequest.SerializeToString)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("penstock.v1.PromptService", {{"SubmitPrompts": handler}})])
    server.add_insecure_port("127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()
asyncio.run(main())
"""


class Load:
    """Sends requests over open connections, and records how long each took."""

    def __init__(self) -> None:
        self.latencies_s: dict[str, list[float]] = {}

    def rest(self, name: str, port: int, body: bytes, count: int, connections: int) -> float:
        return asyncio.run(self._rest(name, port, body, count, connections))

    async def _rest(self, name: str, port: int, body: bytes, count: int, connections: int) -> float:
        head = (
            f"POST /v1/runs/-/prompts HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Type: application/json\r\n"
        )
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        streams = [await asyncio.open_connection("127.0.0.1", port, limit=2**24) for _ in range(connections)]

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, times: list[float]) -> None:
            for _ in range(count // connections):
                started = time.perf_counter()
                writer.write(request)
                header = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in header[:20], header
                length = int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                times.append(time.perf_counter() - started)

        return await self._timed(name, [functools.partial(work, *stream) for stream in streams], count, streams)

    def grpc(
        self, name: str, port: int, request: prompts_pb2.SubmitPromptsRequest, count: int, connections: int
    ) -> float:
        return asyncio.run(self._grpc(name, port, request, count, connections))

    async def _grpc(
        self, name: str, port: int, request: prompts_pb2.SubmitPromptsRequest, count: int, connections: int
    ) -> float:
        payload = request.SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(connections)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))

        async def work(channel: grpc.aio.Channel, times: list[float]) -> None:
            call: Any = channel.unary_unary(METHOD)  # bytes both ways keep the caller's own work small
            for _ in range(count // connections):
                started = time.perf_counter()
                await call(payload, metadata=(("authorization", f"Bearer {KEY}"),))
                times.append(time.perf_counter() - started)

        rate = await self._timed(name, [functools.partial(work, channel) for channel in channels], count, [])
        for channel in channels:
            await channel.close()
        return rate

    async def _timed(
        self, name: str, workers: list[Callable[[list[float]], Any]], count: int, streams: list[Any]
    ) -> float:
        times: list[float] = []
        started = time.perf_counter()
        await asyncio.gather(*(worker(times) for worker in workers))
        rate = count // len(workers) * len(workers) / (time.perf_counter() - started)
        for _, writer in streams:
            writer.close()
            await writer.wait_closed()
        self.latencies_s.setdefault(name, []).append(statistics.quantiles(times, n=100)[98])
        return rate


def p99(load: Load, name: str) -> Measurement:
    """1 / p99, a rate, so that higher is better as for the other contenders. The warm-up round is skipped."""
    return Measurement(f"{name}: 1 / p99", "1/s", [1 / latency for latency in load.latencies_s[name][1:]])


def measure(ports: dict[str, int]) -> tuple[list[Measurement], list[Bar]]:
    load = Load()
    body = json.dumps({"prompts": [PROMPT]}).encode()
    request, amount = submission_of(1), (NUM_REQUESTS, CONNECTIONS)
    one = alternate(
        {
            "REST: FastAPI echo": lambda: load.rest("FastAPI echo", ports["echo_rest"], body, *amount),
            "REST: gateway": lambda: load.rest("REST gateway", ports["rest"], body, *amount),
            "gRPC: echo": lambda: load.grpc("gRPC echo", ports["echo_grpc"], request, *amount),
            "gRPC: gateway": lambda: load.grpc("gRPC gateway", ports["grpc"], request, *amount),
        },
        NUM_ROUNDS,
        "requests/s",
    )
    batch_body, batch_request = json.dumps({"prompts": [PROMPT] * BATCH}).encode(), submission_of(BATCH)
    count, connections = NUM_BATCHES, BATCH_CONNECTIONS
    many = alternate(
        {
            "REST: batches of 256": lambda: BATCH * load.rest("b", ports["rest"], batch_body, count, connections),
            "gRPC: batches of 256": lambda: BATCH * load.grpc("b", ports["grpc"], batch_request, count, connections),
        },
        NUM_ROUNDS,
        "prompts/s",
    )
    tails = {name: p99(load, name) for name in ("FastAPI echo", "REST gateway", "gRPC echo", "gRPC gateway")}
    bars = [
        Bar("REST: gateway / FastAPI echo", median_ratio(one["REST: gateway"], one["REST: FastAPI echo"]), 0.5),
        Bar("REST: p99 of the echo / of the gateway", median_ratio(tails["REST gateway"], tails["FastAPI echo"]), 0.5),
        Bar("gRPC: gateway / grpc.aio echo", median_ratio(one["gRPC: gateway"], one["gRPC: echo"]), 0.5),
        Bar("gRPC: p99 of the echo / of the gateway", median_ratio(tails["gRPC gateway"], tails["gRPC echo"]), 0.5),
        Bar("REST: prompts/s in batches of 256", many["REST: batches of 256"].median, 20_000),
        Bar("gRPC: prompts/s in batches of 256", many["gRPC: batches of 256"].median, 20_000),
    ]
    return [*one.values(), *many.values(), *tails.values()], bars


def submission_of(count: int) -> prompts_pb2.SubmitPromptsRequest:
    prompt = request_of(prompts_pb2.Prompt, SubmittedPrompt.model_validate(PROMPT))
    return prompts_pb2.SubmitPromptsRequest(prompts=[prompt] * count)


def main() -> int:
    make_parser().parse_args()
    ports = {key: free_port() for key in ("rest", "grpc", "echo_rest", "echo_grpc")}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        _, url = stack.enter_context(redis_process(folder))
        for echo, script in (("echo_rest", ECHO_REST), ("echo_grpc", ECHO_GRPC)):
            command = [sys.executable, "-c", script.format(port=ports[echo])]
            stack.enter_context(listening(command, ports[echo]))
        config = RunConfig(
            run_dir=folder, model=ModelConfig(path=folder), redis=RedisConfig(url=url),
            gateway=GatewayConfig(port=ports["rest"], grpc_port=ports["grpc"], api_key_file=folder / "key"),
        )  # fmt: skip
        (folder / "key").write_text(KEY)
        stack.enter_context(gateway_process(config, folder / "run.yaml"))
        measurements, bars = measure(ports)
    return 0 if report("gateway", "the gateway, 64 connections, 2 cores", measurements, bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
