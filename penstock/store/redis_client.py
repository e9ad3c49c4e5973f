"""Clients of Redis: one for the event loop, with a blocking twin for payloads; both may wait for a Redis that restarts.

Through the event loop's streams every large buffer is copied several times, and the loop stands still meanwhile. The
twin hands buffers to the socket as they are, and parses answers in its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer, PythonRespSerializer
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.config.service import RedisConfig
from penstock.errors import ConfigError
from penstock.store.redis_errors import guarded

logger = logging.getLogger(__name__)
RETRY_PAUSE_S = 0.2
SENT_APART_BYTES = 32 * 1024
"""Arguments up to this size are joined before they are sent; a larger one is handed to the socket as it is."""
KEPT_BYTES = 16 * 2**20
"""Memory of this order stays with the process from one batch of payloads to the next."""
EXCHANGES_AT_ONCE = 2
T = TypeVar("T")


class Patience:
    """Repeats calls that Redis did not answer, or answers with LOADING, for up to `retry_s`; 0 repeats none.

    The call may have been carried out and only its answer lost: give patience to clients all of whose calls may be
    carried out twice. The learner's may: they are fenced by its term, and change nothing the second time but numbers
    that may have gaps (terms, versions); a take answers with what it took the first time."""

    def __init__(self, retry_s: float) -> None:
        self.retry_s = retry_s

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        started, has_warned = time.monotonic(), False
        while True:
            try:
                answer = await call()
                if has_warned:
                    logger.warning("Redis answers again after %.1f s", time.monotonic() - started)
                return answer
            except (RedisConnectionError, RedisTimeoutError) as error:
                waited_s = time.monotonic() - started
                if waited_s >= self.retry_s or isinstance(error, AuthenticationError):
                    raise
                if not has_warned:
                    logger.warning("Redis does not answer (%s); trying for %.0f s", error, self.retry_s)
                has_warned = True
                await asyncio.sleep(RETRY_PAUSE_S)


class _PayloadPacker:
    """Copies what is small, which saves calls to the kernel, and nothing that is large."""

    def pack(self, *args: Any) -> list[bytes]:
        packer: HiredisRespSerializer | PythonRespSerializer = HiredisRespSerializer()
        if any(isinstance(argument, bytes) and len(argument) > SENT_APART_BYTES for argument in args):
            packer = PythonRespSerializer(SENT_APART_BYTES, _bytes_of)
        packed: list[bytes] = packer.pack(*args)
        return packed


class PayloadLink:
    """A blocking client in threads of its own: while Redis works on one exchange, the next is prepared and sent.
    Connects when it is first used."""

    def __init__(self, config: RedisConfig, options: dict[str, Any], patience: Patience) -> None:
        self.config = config
        self.options = options
        self.patience = patience
        self._threads = ThreadPoolExecutor(max_workers=EXCHANGES_AT_ONCE, thread_name_prefix="payloads")
        self._opening = threading.Lock()
        self._client: redis.Redis | None = None

    async def run(self, call: Callable[[redis.Redis], T]) -> T:
        """`call` with the client, in a thread. A caller that is cancelled does not stop a call that has begun."""
        loop = asyncio.get_running_loop()
        answer = self.patience.persist(lambda: loop.run_in_executor(self._threads, lambda: call(self._open())))
        return cast("T", await guarded(answer))

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _open(self) -> redis.Redis:
        with self._opening:
            if self._client is None:
                self._client = self._make()
                # The C library gives freed memory back to the kernel, page by page to be asked for again, until it has
                # seen one large block freed.
                bytearray(KEPT_BYTES)
            return self._client

    def _make(self) -> redis.Redis:
        if self.config.cluster:
            return cast("redis.Redis", redis.RedisCluster.from_url(self.config.url, **self.options))
        return redis.Redis.from_url(self.config.url, command_packer=_PayloadPacker(), **self.options)


class RedisClient(redis.asyncio.Redis):
    """redis.asyncio.Redis with its twin, which it closes."""

    payloads: PayloadLink
    patience: Patience

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        execute: Any = super().execute_command
        return await self.patience.persist(lambda: execute(*args, **options))

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.payloads.aclose()
        await super().aclose(close_connection_pool)


class RedisClusterClient(RedisCluster):
    """The same for a cluster: the commands of RedisClient, sent to the shard of the run's hash tag."""

    payloads: PayloadLink
    patience: Patience

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        execute: Any = super().execute_command
        return await self.patience.persist(lambda: execute(*args, **options))

    async def aclose(self) -> None:
        await self.payloads.aclose()
        await super().aclose()


def connect(config: RedisConfig, *, patient: bool = False) -> RedisClient:
    """A client with a deadline on every command; a patient one repeats it for `redis.retry_s`. Does not connect yet."""
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        "health_check_interval": 30,
    }
    if config.username:
        options["username"] = config.username
    if config.password_file is not None:
        options["password"] = _read_password(config.password_file)
    for name, path in (
        ("ssl_ca_certs", config.tls_ca_file), ("ssl_certfile", config.tls_cert_file),
        ("ssl_keyfile", config.tls_key_file),
    ):  # fmt: skip
        if path is not None:
            options[name] = str(path)
    kind = RedisClusterClient if config.cluster else RedisClient
    client = cast("RedisClient", kind.from_url(config.url, **options))
    if not config.cluster:
        client.connection_pool.connection_class = _packing_in_c(client.connection_pool.connection_class)
    client.patience = Patience(config.retry_s if patient else 0)
    client.payloads = PayloadLink(config, options, client.patience)
    return client


def _packing_in_c(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """The asynchronous connections of redis-py pack in Python, which is half of what a command costs."""
    pack = HiredisRespSerializer().pack
    return type(connection.__name__, (connection,), {"pack_command": lambda _, *args: pack(*args)})


def _bytes_of(argument: object) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _read_password(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis.password_file: cannot read {path} ({error.strerror})") from error
