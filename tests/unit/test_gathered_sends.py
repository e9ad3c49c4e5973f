"""Large payloads are sent to Redis from where they are, in full and in order."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import redis
from hiredis import pack_command
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.store.redis_client import MAX_PARTS, gathering, packed_mset, send_all


def test_an_mset_is_packed_as_hiredis_packs_it() -> None:
    pairs = ("first", b"x" * 10_000, "größer", b"", "third", bytes(range(256)))
    parts = packed_mset(pairs)
    assert b"".join(parts) == pack_command(("MSET", *pairs))
    assert any(part is pairs[1] for part in parts), "a payload is not copied"


def test_all_bytes_arrive_however_few_the_socket_takes_at_once() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    parts = [bytes([number % 251]) * (number * 37 % 9000) for number in range(MAX_PARTS + 10)]
    received = bytearray()

    def read() -> None:
        while some := theirs.recv(3000):
            received.extend(some)

    reader = threading.Thread(target=read)
    reader.start()
    with ours:
        ours.settimeout(60)
        send_all(ours, parts)
    reader.join(60)
    theirs.close()
    assert received == b"".join(parts)


class Broken:
    """A socket that cannot send."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def sendmsg(self, parts: Any) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"), [(TimeoutError(), RedisTimeoutError), (BrokenPipeError("gone"), RedisConnectionError)]
)
def test_a_connection_that_cannot_send_is_closed_and_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    connection = gathering(redis.Connection)()
    closed: list[bool] = []
    monkeypatch.setattr(connection, "_sock", Broken(error))
    monkeypatch.setattr(connection, "disconnect", lambda *_: closed.append(True))
    with pytest.raises(raised):
        connection.send_packed_command([b"a", b"b"], check_health=False)
    assert closed
    monkeypatch.setattr(connection, "_sock", None)
