"""Every call to Redis: its clients, the translation of its errors, and Lua scripts.

There is one client for the event loop, and one in threads for large payloads. Both can wait while Redis restarts.
asyncio's streams copy a large buffer several times, and the event loop stands still meanwhile. Measured with 16
payloads of 1 MiB on two cores: MSET through the event loop takes 150 to 200 ms and stalls it for 90 to 170 ms; through
`PayloadLink` it takes 25 to 70 ms and stalls the loop for 7 to 65 ms. MGET takes 65 to 110 ms and 35 to 45 ms.

Scripts are loaded once, called by digest, and sent whole if Redis does not know them yet. A script's text is, in this
order: the key names of penstock.store.keys, `store/lua/prelude.lua`, the preludes (`prelude*.lua`) of its own folder if
that is another one, and the script itself. KEYS[1] is the prefix of the keys. Functions of the preludes that the script
does not use, comments and indents are omitted: Redis makes every function again in each call, and reads the whole text
whenever it is sent.

Scripts answer with names, not positions: a record as `{name, value, ...}`, which `read_record` reads, and a table as
`{columns, values}`, which `read_rows` and `read_columns` read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
from hiredis import pack_command
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.config.service import RedisConfig
from penstock.errors import ConfigError, Fenced, PenstockError, QueueFull, Unavailable
from penstock.store.keys import RunKeys, lua_names

REFUSALS = {
    "MISCONF": "Redis accepts no writes because it cannot write to its disk; free space on the disk of its append-only "
    "file, then it goes on by itself",
    "read only replica": "Redis accepts no writes because it has become a replica; set redis.url to the primary",
}
"""Words of the answers of a Redis that accepts no writes, and what to do. It may recover."""


def cannot_write(message: str) -> str:
    """What to do about an answer of Redis that says that it accepts no writes; empty for any other."""
    for words, text in REFUSALS.items():
        if words in message:
            return f"{text} ({' '.join(message[message.index(words) :].split())[:200]})"
    return ""


@contextmanager
def redis_errors() -> Iterator[None]:
    """Translate every RedisError that is raised inside, except NoScriptError: callers then send the script."""
    try:
        yield
    except NoScriptError:
        raise
    except AuthenticationError as error:
        advice = "correct redis.url, or redis.password_file"
        raise Unavailable(f"Redis refuses the user or password ({error}); {advice}") from error
    except (RedisConnectionError, RedisTimeoutError, RedisClusterException) as error:
        raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error
    except OutOfMemoryError as error:
        raise QueueFull("Redis is out of memory; producers wait until the learner has committed") from error
    except ResponseError as error:
        raise _translate_response(str(error)) from error
    except RedisError as error:
        raise PenstockError(f"Redis: {error}") from error


async def guarded(call: Awaitable[Any]) -> Any:
    """Await one call of a Redis client and translate its errors."""
    with redis_errors():
        return await call


def _translate_response(message: str) -> PenstockError:
    if passed := re.search(r"FENCED term (\d+) has passed; the current one is (\d+)", message):
        own, current = int(passed[1]), int(passed[2])
        if current < own:  # terms only grow
            return Fenced(
                f"Redis has lost data: it knows terms up to {current}, and this learner has term {own}; restore Redis' "
                "data, then start the learner again"
            )
    if "FENCED" in message:
        return Fenced(message[message.index("FENCED") + 7 :] + "; another learner has taken over, stop this one")
    if refusal := cannot_write(message):
        return Unavailable(refusal)
    if "OOM command not allowed" in message:
        return QueueFull("Redis is out of memory; producers wait until the learner has committed")
    return PenstockError(f"Redis refused a command: {message}")


class LastAddress:
    """Address of the last connection of one client, for the time when the name of Redis no longer resolves.

    `helm uninstall` deletes the Service of Redis at once, while Redis itself waits for the processes that are stopping.
    The name then resolves to nothing, but the address is still good: new connections go to the last one."""

    host = ""

    @contextmanager
    def instead_of_name(self, connection: Any, error: socket.gaierror) -> Iterator[None]:
        """Let the connection use the address. Raises the error if there is none."""
        if not self.host:
            raise error
        name, connection.host = connection.host, self.host
        try:
            yield
        finally:
            connection.host = name

    def used_by(self, connection: type[Any]) -> type[Any]:
        """The asynchronous connection class, with this address as the fallback for a name that cannot be resolved."""
        last = self

        async def _connect(self: Any) -> None:
            try:
                await connection._connect(self)
            except socket.gaierror as error:
                with last.instead_of_name(self, error):
                    await connection._connect(self)
            last.host = self._writer.get_extra_info("peername")[0]

        return type(connection.__name__, (connection,), {"_connect": _connect})

    def used_by_blocking(self, connection: type[Any]) -> type[Any]:
        """The same for a blocking connection class."""
        last = self

        def _connect(self: Any) -> Any:
            try:
                opened = connection._connect(self)
            except socket.gaierror as error:
                with last.instead_of_name(self, error):
                    opened = connection._connect(self)
            last.host = opened.getpeername()[0]
            return opened

        return type(connection.__name__, (connection,), {"_connect": _connect})


MAX_PARTS = 512
"""Parts of one system call. Linux allows 1,024. redis-py joins the parts of a command before it sends them, or sends
each with its own call. To send them together from where they are takes a fifth less CPU time for 64 groups of 16 KB."""


def packed_mset(pairs: Sequence[str | bytes]) -> list[bytes]:
    """MSET of keys, which are texts, and payloads, which stay the objects that they are."""
    parts: list[bytes] = []
    before = b"*%d\r\n$4\r\nMSET" % (len(pairs) + 1)  # each part but the first ends the payload before it
    for key, payload in zip(pairs[::2], pairs[1::2], strict=True):
        assert isinstance(key, str) and isinstance(payload, bytes)
        name = key.encode()
        parts += (b"%b\r\n$%d\r\n%b\r\n$%d\r\n" % (before, len(name), name, len(payload)), payload)
        before = b""
    return [*parts, b"\r\n"]


def gathering(connection: type[Any]) -> type[Any]:
    """The blocking connection class, but it sends the parts of a command together. TLS has no such call."""

    def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        if not self._sock or not isinstance(command, list) or len(command) < 2:
            connection.send_packed_command(self, command, check_health)
            return
        if check_health:
            self.check_health()
        try:
            send_all(self._sock, command)
        except BaseException as error:
            self.disconnect()
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError("Timeout writing to socket") from error
            if isinstance(error, OSError):
                raise RedisConnectionError(f"Error while writing to socket: {error}") from error
            raise

    return type(connection.__name__, (connection,), {"send_packed_command": send_packed_command})


def send_all(sock: socket.socket, parts: Sequence[bytes]) -> None:
    """Send all bytes of all parts, in order."""
    left: list[Any] = list(parts)
    first = 0
    while first < len(left):
        sent = sock.sendmsg(left[first : first + MAX_PARTS])
        while first < len(left) and sent >= len(left[first]):
            sent -= len(left[first])
            first += 1
        if sent:
            left[first] = memoryview(left[first])[sent:]


async def check_primary(client: redis.asyncio.Redis) -> None:
    """Raise ConfigError if a failover is possible, which may lose the newest writes: if Redis is a replica or a
    Sentinel, or its cluster has replicas. Raise Unavailable if it does not answer or still reads its file."""
    call, is_cluster, answer = cast("Any", client.execute_command), isinstance(client, RedisCluster), dict[Any, Any]()
    with redis_errors():
        # Proxies may not know HELLO, and users of Redis 6 may lack the right to it: then the first write finds out.
        with suppress(ResponseError):
            answer = await call("CLUSTER SLOTS" if is_cluster else "HELLO")
        if is_cluster and any(shard["replicas"] for shard in answer.values()):
            raise ConfigError("the cluster of redis.url has replicas; remove them. Failover is not supported")
        fields = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        if fields.get(b"mode") == b"sentinel" or fields.get(b"role", b"master") != b"master":
            what = "redis.url names a replica or a Sentinel; set it to the primary. Failover is not supported"
            raise ConfigError(what)
        await call("PING")  # Redis answers HELLO even while it reads its file


async def wait_for_primary(client: redis.asyncio.Redis) -> None:
    """`check_primary` as soon as Redis answers: it may start later than this process."""
    while True:
        with suppress(Unavailable):
            return await check_primary(client)
        await asyncio.sleep(RETRY_PAUSE_S)


@dataclass(frozen=True)
class RedisMemory:
    """Memory that Redis uses, and how much it may use."""

    used_bytes: int
    limit_bytes: int
    """`maxmemory`, or the memory of its machine if there is no such limit."""


async def read_redis_memory(client: RedisClient, keys: RunKeys) -> RedisMemory | None:
    """Read the memory of the Redis, or of the shard, that holds a run. None if this user may not call INFO."""
    try:
        if isinstance(client, RedisCluster):
            node = client.get_node_from_key(keys.counters)
            info: dict[str, Any] = await client.execute_command("INFO", "memory", target_nodes=node)
        else:
            asked: Any = client.info("memory")
            info = await asked
    except (NoPermissionError, ResponseError):
        return None
    limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
    return RedisMemory(int(info["used_memory"]), limit)


logger = logging.getLogger(__name__)
RETRY_PAUSE_S = 0.2
SENT_APART_BYTES = 8 * 1024
"""Arguments up to this size are joined before they are sent; larger ones go to the socket as they are."""
KEPT_BYTES = 16 * 2**20
"""About how much memory the process keeps from one batch of payloads to the next."""
EXCHANGES_AT_ONCE = 2
MAX_CONNECTIONS = 100
T = TypeVar("T")


async def call_patiently(call: Callable[[], Awaitable[T]], retry_s: float) -> T:
    """Await `call`. Repeat it for up to `retry_s` while Redis does not answer, answers LOADING, or accepts no writes:
    see REFUSALS, of which one says that it has become a replica. 0 repeats nothing. The time begins with the first
    failure, so a process that was suspended in a call asks again.

    Redis may have executed the call and only the answer was lost, so use this only for clients whose calls may all be
    executed twice. The learner's may: its term fences them, and the second execution changes nothing except numbers
    that may have gaps (terms, versions). A repeated take returns the groups that the first one took."""
    failed_at = 0.0
    while True:
        try:
            answer = await call()
            break
        except (RedisConnectionError, RedisTimeoutError, ResponseError) as error:
            what = cannot_write(str(error)) if isinstance(error, ResponseError) else f"Redis does not answer ({error})"
            is_first, failed_at = not failed_at, failed_at or time.monotonic()
            if not what or isinstance(error, AuthenticationError) or time.monotonic() - failed_at >= retry_s:
                raise
            if is_first:
                logger.warning("%s; retrying for %.0f s", what, retry_s)
            await asyncio.sleep(RETRY_PAUSE_S)
    if failed_at:
        logger.warning("Redis answers again after %.1f s", time.monotonic() - failed_at)
    return answer


class _PayloadPacker:
    """Packs commands with hiredis, except MSET of large payloads, which are sent from where they are. For small
    arguments hiredis is faster: an append of 63 groups of 2 kB takes 1.45 ms instead of 1.7 ms. It is called without
    redis-py's checks of every argument."""

    def pack(self, *args: Any) -> list[bytes]:
        if args[0] == "MSET" and max(map(len, args[2::2])) > SENT_APART_BYTES:
            return packed_mset(args[1:])
        return _packed_in_c(*args)


class PayloadLink:
    """A blocking client in its own threads, for large payloads. It prepares and sends one exchange while Redis works on
    the one before. It connects when it is first used."""

    def __init__(self, config: RedisConfig, options: dict[str, Any], retry_s: float, last: LastAddress) -> None:
        self.config = config
        self.options = options
        self.retry_s = retry_s
        self.last = last
        self._threads = ThreadPoolExecutor(max_workers=EXCHANGES_AT_ONCE, thread_name_prefix="payloads")
        self._opening = threading.Lock()
        self._client: redis.Redis | None = None

    async def run(self, call: Callable[[redis.Redis], T]) -> T:
        """Run `call` with the client in a thread. Cancelling the caller does not stop a call that has begun."""
        loop = asyncio.get_running_loop()
        answer = call_patiently(lambda: loop.run_in_executor(self._threads, lambda: call(self._open())), self.retry_s)
        return cast("T", await guarded(answer))

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _open(self) -> redis.Redis:
        with self._opening:
            if self._client is None:
                self._client = self._make()
                # The C library returns freed memory to the kernel, which costs a page fault each time it is used again.
                # It stops doing so for blocks up to the size of one that was freed.
                bytearray(KEPT_BYTES)
            return self._client

    def _make(self) -> redis.Redis:
        if self.config.cluster:
            return cast("redis.Redis", redis.RedisCluster.from_url(self.config.url, **self.options))
        client = redis.Redis.from_url(self.config.url, command_packer=_PayloadPacker(), **self.options)
        pool = client.connection_pool
        if issubclass(pool.connection_class, redis.Connection):
            pool.connection_class = self.last.used_by_blocking(pool.connection_class)
            if not issubclass(pool.connection_class, redis.SSLConnection):
                pool.connection_class = gathering(pool.connection_class)
        return client


class _PatientClient:
    """A client with a `PayloadLink`, which it closes. Calls are repeated for up to `retry_s`."""

    payloads: PayloadLink
    retry_s: float
    max_block_s: float
    """Longest time that a blocking command may wait: less than the deadline of a command."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        execute: Any = super().execute_command  # type: ignore[misc]
        return await call_patiently(lambda: execute(*args, **options), self.retry_s)

    async def aclose(self, *args: Any) -> None:
        await self.payloads.aclose()
        await super().aclose(*args)  # type: ignore[misc]


class RedisClient(_PatientClient, redis.asyncio.Redis):  # type: ignore[misc]
    """The client of one Redis."""


class RedisClusterClient(_PatientClient, RedisCluster):  # type: ignore[misc]
    """The client of a cluster: commands go to the shard of the run's hash tag."""


def connect(config: RedisConfig, *, patient: bool = False, max_connections: int = MAX_CONNECTIONS) -> RedisClient:
    """A client with a deadline on every command; a patient one repeats commands for up to `redis.retry_s`. It connects
    when it is first used. A command waits, up to its deadline, while all connections are in use."""
    try:
        password = config.password_file and config.password_file.read_text().strip()
    except OSError as error:
        text = f"redis.password_file: cannot read {config.password_file} ({error.strerror})"
        raise ConfigError(text) from error
    given = {
        "username": config.username,
        "password": password,
        "ssl_ca_certs": config.tls_ca_file and str(config.tls_ca_file),
        "ssl_certfile": config.tls_cert_file and str(config.tls_cert_file),
        "ssl_keyfile": config.tls_key_file and str(config.tls_key_file),
    }
    timeouts = {"socket_timeout": config.timeout_s, "socket_connect_timeout": config.timeout_s}
    options: dict[str, Any] = timeouts | {name: value for name, value in given.items() if value}
    options["health_check_interval"] = 30
    last = LastAddress()
    if config.cluster:
        client = cast(
            "RedisClient", RedisClusterClient.from_url(config.url, max_connections=max_connections, **options)
        )
    else:
        pool = _Connections.from_url(config.url, max_connections=max_connections, timeout=config.timeout_s, **options)
        pool.connection_class = _cheap(pool.connection_class)
        if issubclass(pool.connection_class, redis.asyncio.Connection):
            pool.connection_class = last.used_by(pool.connection_class)
        client = cast("RedisClient", RedisClient.from_pool(pool))
    client.max_block_s = config.timeout_s / 2
    client.retry_s = config.retry_s if patient else 0
    client.payloads = PayloadLink(config, options, client.retry_s, last)
    return client


class _Connections(redis.asyncio.BlockingConnectionPool):
    """A pool that waits for a connection only if all are in use."""

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        pool: Any = super()
        if not self.can_get_connection():
            return await pool.get_connection()
        connection = pool.get_available_connection()
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection


def _cheap(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """A connection class that packs commands with hiredis and sends without a task. redis-py's asynchronous connections
    pack in Python and cannot be given another packer: a submission of 512 prompts takes 0.5 ms of CPU time with hiredis
    and 0.95 ms without. They also send each command in its own task, because it may have to wait for the socket.
    It almost never does, and the task is a sixth of the cost of a small command."""

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        send: Any = connection.send_packed_command
        if not self.is_connected or not isinstance(command, list):
            await send(self, command, check_health)
            return
        if check_health:
            await self.check_health()
        writer: asyncio.StreamWriter = self._writer
        if writer.transport.is_closing():  # uvloop raises RuntimeError if a closed transport is written to
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the connection was closed")
        writer.writelines(command)
        if writer.transport.get_write_buffer_size() > 0:  # the socket is full; redis-py waits, with its deadline
            await send(self, [], check_health=False)

    methods = {"pack_command": lambda _, *args: _packed_in_c(*args), "send_packed_command": send_packed_command}
    return type(connection.__name__, (connection,), methods)


def _packed_in_c(name: str, *arguments: Any) -> list[bytes]:
    """A command as redis-py's HiredisRespSerializer packs it, but without a look at each argument in Python: all are
    texts, bytes or numbers."""
    return [pack_command((*name.split(), *arguments))]


# ── scripts ──


@dataclass(frozen=True)
class Script:
    text: str
    sha: str


@dataclass(frozen=True)
class ScriptFolder:
    """The folder `lua` of a package."""

    package: str

    @cache  # noqa: B019  (there are three folders, which live as long as the process)
    def load(self, name: str) -> Script:
        folders = [resources.files(package) / "lua" for package in dict.fromkeys((STORE.package, self.package))]
        entries = [entry for lua in folders for entry in sorted(lua.iterdir(), key=lambda entry: entry.name)]
        prelude = "".join(entry.read_text() for entry in entries if entry.name.startswith("prelude"))
        own = (folders[-1] / f"{name}.lua").read_text()
        body = _without_unused(_without_comments(prelude), _without_comments(own))
        text = lua_names(body) + re.sub(r"^ +", "", body, flags=re.MULTILINE)
        return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    async def call(self, client: Any, prefix: str, name: str, *arguments: Any) -> Any:
        """Run a script on the keys of `prefix`. Errors of Redis are translated to those of `penstock.errors`."""
        script = self.load(name)
        try:
            return await guarded(client.evalsha(script.sha, 1, prefix, *arguments))
        except NoScriptError:
            return await guarded(client.eval(script.text, 1, prefix, *arguments))


STORE = ScriptFolder("penstock.store")
QUEUE = ScriptFolder("penstock.replay")
SESSIONS = ScriptFolder("penstock.sessions")


class RunRecords:
    """Some records of one run in Redis. A subclass says which."""

    scripts = STORE

    def __init__(self, client: Any, run: str) -> None:
        self.client = client
        self.run = run
        self.keys = RunKeys(run)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run a script on the run's keys."""
        return await self.scripts.call(self.client, self.keys.prefix, name, *arguments)

    async def now_ms(self) -> int:
        """Redis' own clock, so that no two clocks are ever compared."""
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def hash_of(self, key: str) -> dict[str, bytes]:
        """All fields of a hash, sorted by name."""
        return {name.decode(): value for name, value in sorted((await guarded(self.client.hgetall(key))).items())}

    async def number_of(self, key: str, field: str | int) -> int | None:
        """A number in a hash; None if it is not there."""
        value = await guarded(self.client.hget(key, field))
        return int(value) if value else None


_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
"""A function of a prelude. It begins and ends in the first column; nothing within it does."""


def _without_comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\s*(--|$)", line))


def _without_unused(prelude: str, own: str) -> str:
    """Both texts, without the functions of the prelude that nothing after them names. Lua's local functions are used
    only after they were defined, so one pass from the end finds them all. A function that only one other function of
    the prelude names moves into it, so that it is made only when that one is called."""
    parts, end = [own], len(prelude)
    for function in reversed(list(_FUNCTION.finditer(prelude))):
        parts.insert(0, prelude[function.end() : end])
        users = [i for i, part in enumerate(parts) if re.search(rf"\b{function[1]}\b", part)]
        if len(users) == 1 and parts[users[0]] is not own and _FUNCTION.fullmatch(parts[users[0]]):
            start = parts[users[0]].index("\n") + 1
            parts[users[0]] = parts[users[0]][:start] + function[0] + parts[users[0]][start:]
        elif users:
            parts.insert(0, function[0])
        end = function.start()
    return prelude[:end] + "".join(parts)


def read_record(answer: Sequence[Any]) -> dict[str, Any]:
    """Read `{name, value, ...}` as a dictionary."""
    return {answer[i].decode(): answer[i + 1] for i in range(0, len(answer), 2)}


def read_columns(answer: Sequence[Any]) -> dict[str, list[Any]]:
    """Read `{columns, values}` as one list per column. The values of all rows follow each other."""
    columns, values = answer
    return {column.decode(): values[i :: len(columns)] for i, column in enumerate(columns)}


def read_rows(answer: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Read `{columns, values}` as one dictionary per row."""
    columns = read_columns(answer)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def read_known_fields(kind: type[T], record: Mapping[str, Any]) -> T:
    """Build the dataclass `kind` from a record. During a rolling upgrade the writer may be newer or older than the
    reader: fields that `kind` does not have are ignored, and missing ones take their default. Lists become tuples."""
    names: Any = kind.__dataclass_fields__  # type: ignore[attr-defined]
    known = {name: value for name, value in record.items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
