"""A gateway and a rollout server's generate service over a real torch engine, in a thread, for tests with real SDKs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio as redis

from penstock.config.rollout import EngineConfig
from penstock.config.service import ReplayConfig
from penstock.internal_calls import ClusterKey
from penstock.store.fleet import Fleet, ServerRecord
from penstock.v1 import generate_pb2_grpc
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.fleet.membership import make_listener
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization
from support.gateways import Gateway, run_config, running
from support.scripted_engines import make_tokenizer_folder
from support.tiny_models import write_qwen2

START_S = 240.0
MAX_MODEL_LEN = 900


@dataclass(frozen=True)
class ProtocolRun:
    """Where the gateway of a running run is. Clients of any kind call it from other threads."""

    url: str
    key: str


@contextmanager
def protocol_run(redis_url: str, folder: Path) -> Iterator[ProtocolRun]:
    """Serve the run `test` with a random model that knows letters, digits and the signs of JSON."""
    ready: Future[tuple[ProtocolRun, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with _served(redis_url, folder) as run:
                ready.set_result((run, asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="protocol-run", daemon=True)
    thread.start()
    run, loop, stop = ready.result(START_S)
    yield run
    loop.call_soon_threadsafe(stop.set)
    thread.join(START_S)
    assert not thread.is_alive()


@asynccontextmanager
async def _served(redis_url: str, folder: Path) -> AsyncIterator[ProtocolRun]:
    make_tokenizer_folder(folder)
    write_qwen2(folder)
    replay = ReplayConfig(lease_ttl_s=3600)  # the server sends no heartbeats
    config = run_config(redis_url, folder).model_copy(update={"replay": replay})
    ClusterKey.of(config).make_if_missing()
    engine = TorchEngine(EngineConfig(max_model_len=MAX_MODEL_LEN), folder, "float32", seed=7)
    await engine.start(policy_version=3)
    listener = make_listener(ClusterKey.of(config))
    service = GenerateService("test", "r0", engine, Tokenization(folder), MAX_MODEL_LEN)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    async with redis.Redis.from_url(redis_url) as client:
        fleet = Fleet(client, "test")
        await fleet.join(ServerRecord("r0", f"127.0.0.1:{port}", "torch", policy_version=3))
        await fleet.set_state("r0", "READY")
        gateway: Gateway
        async with running(config) as gateway:
            yield ProtocolRun(gateway.url, gateway.key)
    await listener.stop(None)
    await engine.stop()
