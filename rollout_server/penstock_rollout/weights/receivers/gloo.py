"""gloo: join the publisher's process group over TCP and take part in one broadcast a piece of a bucket."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from penstock.errors import WeightPushFailed
from penstock.weights.checksums import RunningChecksum
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import POLL_S, Patience
from penstock.weights.transports import GLOO_PIECE_BYTES, GLOO_PIECES_AT_ONCE, PUBLISHER_RANK
from penstock_rollout.weights.reception import Arrived, Reception

CONNECT_RETRY_S = 0.05
PIECE_POLL_S = 0.001


def receive(reception: Reception) -> Iterator[Arrived]:
    """Buckets in host memory. The rendezvous is `host:port/prefix` of the publisher's store."""
    host, port, prefix = parse_rendezvous(reception.rendezvous)
    patience = reception.patience
    patience.until(lambda: _listens(host, port, patience.left_s), poll_s=CONNECT_RETRY_S)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience.left_s))
        met = PatientStore(PrefixStore(prefix, store), patience)
        group = ProcessGroupGloo(met, reception.rank, reception.world_size, _options(patience.left_s))
        yield from _broadcasts(group, reception)
    except RuntimeError as error:
        patience.check()
        first_line = str(error).partition("\n")[0]
        raise WeightPushFailed(f"receiving weights from {reception.rendezvous} failed: {first_line}") from error


class PatientStore(Store):
    """A store whose waits end with a Patience: gloo's own rendezvous cannot be interrupted otherwise."""

    def __init__(self, inner: Any, patience: Patience) -> None:
        super().__init__()
        self._inner = inner
        self._patience = patience

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._patience.until(lambda: self.check(keys), poll_s=0.01)


def parse_rendezvous(rendezvous: str) -> tuple[str, int, str]:
    """Split `host:port/prefix`."""
    address, slash, prefix = rendezvous.partition("/")
    host, colon, port = address.rpartition(":")
    if not (slash and colon and host and prefix and port.isdigit()):
        raise WeightPushFailed(f"rendezvous {rendezvous!r} is not host:port/prefix")
    return host.strip("[]"), int(port), prefix


def _options(timeout_s: float) -> Any:
    """A thread for every piece under way, and one for the broadcast that breaks them off."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch's own constructor reads it
    options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = GLOO_PIECES_AT_ONCE + 1
    return options


def _listens(host: str, port: int, left_s: float) -> bool:
    """Whether the publisher's store is up. TCPStore would retry on its own, and could not be aborted."""
    try:
        with socket.create_connection((host, port), timeout=min(left_s, 1.0)):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class _Piece:
    """A part of a bucket's wire bytes."""

    wire: torch.Tensor
    """The whole bucket's."""
    bytes: torch.Tensor
    is_last: bool
    checksum: RunningChecksum | None
    """Of the bucket, where whole buckets travel: a delta is decoded before it is hashed."""


def _pieces(reception: Reception) -> Iterator[_Piece]:
    """In the order in which they are sent. A bucket's memory is taken when its first piece is asked for."""
    manifest = reception.manifest
    for bucket, num_bytes in zip(manifest.buckets, wire_sizes(manifest), strict=True):
        wire = reception.buffer(num_bytes, torch.device("cpu"))
        checksum = None if bucket.wire_bytes else RunningChecksum(manifest.checksum)
        *others, last = wire.split(GLOO_PIECE_BYTES)
        yield from (_Piece(wire, piece, False, checksum) for piece in others)
        yield _Piece(wire, last, True, checksum)


def _broadcasts(group: Any, reception: Reception) -> Iterator[Arrived]:
    """The buckets in order, some pieces under way at once."""
    under_way: deque[tuple[Any, _Piece]] = deque()
    pieces = _pieces(reception)
    try:
        while True:
            for piece in itertools.islice(pieces, GLOO_PIECES_AT_ONCE - len(under_way)):
                under_way.append((group.broadcast([piece.bytes], _from_publisher()), piece))
            if not under_way:
                return
            work, piece = under_way[0]
            reception.patience.until(work.is_completed, PIECE_POLL_S)
            work.wait()
            under_way.popleft()
            if piece.checksum is not None:
                piece.checksum.update(piece.bytes.numpy())
            if piece.is_last:
                yield Arrived(piece.wire, piece.checksum.value if piece.checksum else "")
    finally:
        if under_way:
            break_connections(group, [work for work, _ in under_way])


def break_connections(group: Any, works: list[Any]) -> None:
    """Fail pending broadcasts at once. Gloo has no abort, but an operation that times out closes every connection of
    its group; without this the group's destructor waits for the stalled ones. The group needs a thread to spare."""
    options = _from_publisher()
    options.timeout = timedelta(milliseconds=1)
    works = [*works, group.broadcast([torch.zeros(1, dtype=torch.uint8)], options)]
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and not all(work.is_completed() for work in works):
        time.sleep(POLL_S)


def _from_publisher() -> Any:
    options = BroadcastOptions()
    options.rootRank = PUBLISHER_RANK
    options.rootTensor = 0
    return options
