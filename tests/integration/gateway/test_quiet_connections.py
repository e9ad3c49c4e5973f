"""What a generate call sends over a connection that was idle: the call, and no ping of gRPC's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from penstock.config.run import ModelConfig, RunConfig
from penstock.internal_calls import ClusterKey
from penstock.v1 import generate_pb2, generate_pb2_grpc
from penstock_rollout.fleet.membership import make_listener
from penstock_services.gateway.generate import CHANNEL_OPTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, PING = 0, 6
ANSWER_BYTES = 20_000


class Answers(generate_pb2_grpc.GenerateServiceServicer):
    async def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        yield generate_pb2.GenerateChunk(text="a" * ANSWER_BYTES)


class FrameCounter:
    """Passes an HTTP/2 connection on to a port, and counts its frames by type, in both directions."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.frames: Counter[int] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        far_writer.write(await reader.readexactly(len(PREFACE)))
        self.tasks = [
            asyncio.create_task(self._pass_on(reader, far_writer)),
            asyncio.create_task(self._pass_on(far_reader, writer)),
        ]

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = await reader.readexactly(9)
                self.frames[header[3]] += 1
                writer.write(header + await reader.readexactly(int.from_bytes(header[:3], "big")))
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def frames_of_calls(
    listener: grpc.aio.Server, key: ClusterKey, options: tuple[tuple[str, int], ...]
) -> Counter[int]:
    """The frames of three calls, one after the other."""
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(Answers(), listener)
    counter = FrameCounter(listener.add_insecure_port("127.0.0.1:0"))
    await listener.start()
    relay = await asyncio.start_server(counter.accept, "127.0.0.1", 0)
    try:
        address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(100), grpc.aio.insecure_channel(address, options=options) as channel:
            stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)
            for _ in range(3):
                call = stub.Generate(generate_pb2.GenerateRequest(text="b" * ANSWER_BYTES), metadata=key.metadata())
                assert [len(chunk.text) async for chunk in call] == [ANSWER_BYTES]
    finally:
        relay.close()
        await counter.close()
        await listener.stop(0)
    return counter.frames


def make_key(folder: Path) -> ClusterKey:
    key = ClusterKey.of(RunConfig(run="test", run_dir=folder, model=ModelConfig(path=folder)))
    key.make_if_missing()
    return key


async def test_neither_side_of_a_generate_call_pings(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    frames = await frames_of_calls(make_listener(key), key, CHANNEL_OPTIONS)
    assert frames[DATA] >= 6
    assert frames[PING] == 0


async def test_the_counter_sees_the_pings_of_a_plain_connection(tmp_path: Path) -> None:
    frames = await frames_of_calls(grpc.aio.server(), make_key(tmp_path), ())
    assert frames[PING] > 0
