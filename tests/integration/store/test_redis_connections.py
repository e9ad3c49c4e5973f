"""Connections to Redis: Unix socket, TLS, a user with a password file, and a cluster. Each test does a round trip.

Every process refuses a Redis whose failover could take acknowledged writes: see docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis as blocking
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from penstock.cli import main as cli
from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig, WeightsConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import ConfigError, Unavailable, first_error
from penstock.feed.feed_process import feed_run
from penstock.machine import free_port, port_is_free, wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, ServerRecord
from penstock.store.redis_client import check_primary, connect
from penstock.v1 import policies_pb2
from penstock_learner.__main__ import serve as serve_learner
from penstock_rollout import server as rollout_server
from penstock_services.gateway.server import serve as serve_gateway
from penstock_tools.local.private_redis import find_redis_server
from support.certificates import make_certificate
from support.gateways import run_config, running
from support.processes import until
from support.redis_server import RedisProcess
from support.scripted_engines import make_tokenizer_folder


async def round_trip(config: RedisConfig) -> None:
    """Process groups from submission to commit, and use everything else that a run keeps in Redis."""
    client = connect(config)
    try:
        queue = RedisReplayQueue(client, "connections", ReplayConfig(groups_per_step=2))
        await queue.submit([b"p"] * 2, [0, 1], "")
        await queue.wait_for_prompts(5)
        leases = await queue.lease("s", 2)
        for lease in leases:
            assert await queue.append(lease, b"group", 0) == "accepted"
        await queue.take_term(0)
        await queue.wait_for_groups(5)
        taken = await queue.take(1, 2)
        assert [delivery.payload for delivery in await queue.fetch(taken)] == [b"group"] * 2
        assert await queue.commit(1, taken) == 2
        await queue.publish(1, 1, policies_pb2.Policy(policy_version=1).SerializeToString())
        assert (await PolicyRegistry(client, "connections").newest_first(None, 5))[0].policy_version == 1
        await queue.create_evaluation("e", [b"q"])
        assert (await queue.get_evaluation("e")).num_prompts == 1
        assert await queue.dead_letter_reasons() == {}
        fleet = Fleet(client, "connections")
        await fleet.join(ServerRecord("s", "127.0.0.1:1", "torch"))
        await fleet.set_state("s", "READY")
        assert [server.state for server in await fleet.servers()] == ["READY"]
        assert (await queue.stat()).conservation_error == 0
    finally:
        await client.aclose()


@contextlib.contextmanager
def redis_server(*options: str, port: int) -> Iterator[None]:
    process = subprocess.Popen(
        [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_for_port("127.0.0.1", port, timeout_s=100), "Redis did not start"
        yield
    finally:
        process.kill()
        process.wait(timeout=100)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


async def test_unix_socket(tmp_path: Path) -> None:
    with redis_server("--unixsocket", str(tmp_path / "redis.sock"), port=free_port()):
        until(lambda: _answers(tmp_path / "redis.sock"), "the socket, which Redis opens after its port")
        await round_trip(RedisConfig(url=f"unix://{tmp_path}/redis.sock"))


async def test_a_user_with_a_password_file(redis_process: RedisProcess, redis_client: Redis, tmp_path: Path) -> None:
    url = urlsplit(redis_process.url)
    password = tmp_path / "password"
    password.write_text(f"{url.password}\n")
    bare = f"redis://{url.hostname}:{url.port}/0"
    await round_trip(RedisConfig(url=bare, username="default", password_file=password))
    password.write_text("wrong")
    with pytest.raises(Unavailable, match="refuses the user or password .*; correct redis.url"):
        await round_trip(RedisConfig(url=bare, username="default", password_file=password))
    with pytest.raises(ConfigError, match=r"redis\.password_file"):
        connect(RedisConfig(url=bare, password_file=tmp_path / "none"))


# ── TLS ──


@pytest.fixture
async def tls_port(tmp_path: Path, redis_process: RedisProcess, redis_client: Redis) -> AsyncIterator[int]:
    """TLS in front of a plain Redis, because not every build of it has TLS. Asks for a client's certificate."""
    make_certificate(tmp_path, "ca")
    make_certificate(tmp_path, "end", "ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "end.crt", tmp_path / "end.key")
    context.load_verify_locations(tmp_path / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", redis_process.port)
        await asyncio.gather(pump(reader, behind_writer), pump(behind_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tls(tls_port: int, tmp_path: Path, redis_process: RedisProcess) -> None:
    url = f"rediss://:{urlsplit(redis_process.url).password}@127.0.0.1:{tls_port}/0"
    ours = {"tls_cert_file": tmp_path / "end.crt", "tls_key_file": tmp_path / "end.key"}
    await round_trip(RedisConfig(url=url, tls_ca_file=tmp_path / "ca.crt", **ours))
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        await round_trip(RedisConfig(url=url, **ours))
    with pytest.raises(Unavailable):
        await round_trip(RedisConfig(url=url, tls_ca_file=tmp_path / "ca.crt"))


async def test_a_gateway_and_a_command_over_tls(
    tls_port: int, tmp_path: Path, redis_process: RedisProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command to the gateway, and from the gateway to Redis. Both ask for the other side's certificate."""
    authority, certificate, key = tmp_path / "ca.crt", tmp_path / "end.crt", tmp_path / "end.key"
    (tmp_path / "both.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    files = {"tls_cert_file": certificate, "tls_key_file": key}
    password = urlsplit(redis_process.url).password
    to_redis = RedisConfig(url=f"rediss://:{password}@127.0.0.1:{tls_port}/0", tls_ca_file=authority, **files)
    config = run_config("redis://", tmp_path, tls_client_ca_file=authority, **files)
    async with running(config.model_copy(update={"redis": to_redis})) as gateway:
        where = ["--url", f"https://127.0.0.1:{gateway.rest_port}", "--api-key-file", f"{config.folder}/gateway.key"]
        flags = ["--tls-ca-file", str(authority), "--tls-cert-file", f"{tmp_path}/both.pem"]
        assert await asyncio.to_thread(cli.main, ["runs", "list", *where, *flags]) == 0
        assert "test" in capsys.readouterr().out
        assert await asyncio.to_thread(cli.main, ["runs", "list", *where, *flags[:3], str(authority)]) == 2
        assert "--tls-ca-file or --tls-cert-file cannot be used" in capsys.readouterr().err


# ── failover ──


@contextlib.contextmanager
def replica(folder: Path) -> Iterator[RedisConfig]:
    """A replica whose primary does not answer."""
    port = free_port()
    with redis_server("--replicaof", "127.0.0.1", "1", "--dir", str(folder), port=port):
        yield RedisConfig(url=f"redis://127.0.0.1:{port}/0")


@contextlib.contextmanager
def sentinel(folder: Path) -> Iterator[RedisConfig]:
    port, config = free_port(), folder / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n")
    process = subprocess.Popen([find_redis_server(), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        assert wait_for_port("127.0.0.1", port, timeout_s=100)
        yield RedisConfig(url=f"redis://127.0.0.1:{port}/0")
    finally:
        process.kill()
        process.wait(timeout=100)


@contextlib.contextmanager
def cluster_with_a_replica(folder: Path) -> Iterator[RedisConfig]:
    ports = [cluster_port(), cluster_port()]
    with contextlib.ExitStack() as stack:
        for port in ports:
            (folder / str(port)).mkdir()
            options = ("--cluster-enabled", "yes", "--dir", str(folder / str(port)))
            stack.enter_context(redis_server(*options, port=port))
        primary, second = (stack.enter_context(blocking.Redis(port=port)) for port in ports)
        primary.execute_command("CLUSTER ADDSLOTS", *range(16384))
        second.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        name = primary.execute_command("CLUSTER MYID").decode()
        until(lambda: name in str(second.execute_command("CLUSTER NODES")), "the nodes to meet")
        second.execute_command("CLUSTER REPLICATE", name)
        until(lambda: str(ports[1]) in str(primary.execute_command("CLUSTER SLOTS")), "the replica in the cluster")
        yield RedisConfig(url=f"redis://127.0.0.1:{ports[0]}/0", cluster=True)


REFUSED = r"^redis\.url names a replica or a Sentinel; set it to the primary"


@pytest.mark.parametrize(
    ("start", "why"),
    [(replica, REFUSED), (sentinel, REFUSED), (cluster_with_a_replica, r"^the cluster of redis\.url has replicas")],
)
async def test_what_may_fail_over_is_refused(
    start: Callable[[Path], contextlib.AbstractContextManager[RedisConfig]], why: str, tmp_path: Path
) -> None:
    with start(tmp_path) as config:
        client = connect(config)
        with pytest.raises(ConfigError, match=why):
            await check_primary(client)
        await client.aclose()


async def serve_rollout(config: RunConfig) -> None:
    await rollout_server.serve(config, "r0")


PROCESSES: dict[str, Callable[[RunConfig], Awaitable[None]]] = {
    "gateway": serve_gateway, "rollout": serve_rollout, "learner": serve_learner, "feed": feed_run,
}  # fmt: skip


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process sets variables of its own, and has one registry of metrics."""
    before = dict(os.environ)
    monkeypatch.setattr(rollout_server, "REGISTRY", CollectorRegistry())
    yield
    os.environ.clear()
    os.environ.update(before)


def config_of_any_process(redis: RedisConfig, folder: Path) -> RunConfig:
    make_tokenizer_folder(folder)
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n')
    config = run_config(redis.url, folder)
    config.folder.mkdir(exist_ok=True)
    changes = {"redis": redis, "dataset": config.dataset.model_copy(update={"file": folder / "data.jsonl"})}
    engine = config.rollout.model_copy(update={"engine": EngineConfig(name="torch")})
    return config.model_copy(update=changes | {"rollout": engine})


@pytest.mark.parametrize("process", PROCESSES)
async def test_every_process_refuses_what_may_fail_over(process: str, tmp_path: Path, own_environment: None) -> None:
    with replica(tmp_path) as redis, pytest.raises(ConfigError, match=REFUSED):
        async with asyncio.timeout(120):
            await PROCESSES[process](config_of_any_process(redis, tmp_path))


@pytest.mark.parametrize(("process", "setting"), [("rollout", "rollout.host"), ("learner", "learner.publish_host")])
async def test_links_that_are_not_encrypted_are_logged_at_start(
    process: str, setting: str, tmp_path: Path, own_environment: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cluster-key").write_text("secret")
    with replica(tmp_path) as redis, pytest.raises(ConfigError, match=REFUSED):
        config = config_of_any_process(redis, tmp_path)
        beyond = {
            "rollout": config.rollout.model_copy(update={"host": "0.0.0.0"}),
            "learner": config.learner.model_copy(update={"publish_host": "0.0.0.0"}),
            "weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key"),
        }
        await PROCESSES[process](config.model_copy(update=beyond))
    [line] = [record.getMessage() for record in caplog.records if "not encrypted" in record.getMessage()]
    assert line.startswith(f"{setting} 0.0.0.0 is not loopback: ")


@pytest.mark.parametrize("process", ["gateway", "rollout"])
async def test_a_redis_that_starts_later_is_refused_too(
    process: str, tmp_path: Path, own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These processes start without Redis. The rollout server loads its engine meanwhile."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        started = asyncio.Event()

        def start_redis(*_: object) -> None:
            stack.enter_context(redis_server("--replicaof", "127.0.0.1", "1", "--dir", str(tmp_path), port=port))
            started.set()

        async def start_engine(*_: object) -> None:
            start_redis()

        monkeypatch.setattr(rollout_server, "start_engine", start_engine)
        config = config_of_any_process(RedisConfig(url=f"redis://127.0.0.1:{port}/0"), tmp_path)
        run: Any = serve_rollout(config) if process == "rollout" else serve_gateway(config, start_redis)
        with pytest.raises((ConfigError, ExceptionGroup)) as raised:
            async with asyncio.timeout(120):
                await run
        assert started.is_set() and isinstance(first_error(raised.value), ConfigError)


# ── cluster ──


async def test_cluster(tmp_path: Path) -> None:
    """One node serves all slots. The client looks up slots and topology as with many nodes."""
    port = cluster_port()
    with redis_server("--cluster-enabled", "yes", "--dir", str(tmp_path), port=port):
        async with Redis(port=port) as node:
            await node.execute_command("CLUSTER ADDSLOTS", *range(16384))
            async with asyncio.timeout(100):
                while (await node.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        await round_trip(RedisConfig(url=f"redis://127.0.0.1:{port}/0", cluster=True))


def cluster_port() -> int:
    """A free port for which the cluster bus port, 10,000 higher, is free too, and not one that connections get."""
    while (port := free_port()) >= 22_000 or not port_is_free("127.0.0.1", port + 10_000):
        pass
    return port


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_that_is_closed_before_a_call_is_an_error_of_redis(redis_process: RedisProcess, loop: str) -> None:
    """The gateway runs on uvloop, which raises RuntimeError if a closed connection is written to. That ended it."""

    async def call() -> None:
        client = connect(RedisConfig(url=redis_process.url))
        try:
            connection: Any = await client.connection_pool.get_connection()
            connection._writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await connection._writer.wait_closed()
            with pytest.raises(blocking.ConnectionError):
                await connection.send_command("PING")
                await connection.read_response()
            assert not connection.is_connected
            await client.connection_pool.release(connection)
            assert await client.ping()
        finally:
            await client.aclose()

    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(call())
