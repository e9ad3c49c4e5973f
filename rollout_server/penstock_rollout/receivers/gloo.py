"""gloo: join the publisher's process group over TCP and take part in one broadcast a bucket."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from penstock.errors import WeightPushFailed
from penstock.weights.manifest import wire_sizes
from penstock.weights.patience import POLL_S, Patience
from penstock.weights.transports import GLOO_BROADCASTS_AT_ONCE, PUBLISHER_RANK
from penstock_rollout.receivers.reception import Arrived, Reception

CONNECT_RETRY_S = 0.05


def receive(reception: Reception) -> Iterator[Arrived]:
    """Buckets in host memory. The rendezvous is `host:port/prefix` of the publisher's store."""
    host, port, prefix = parse_rendezvous(reception.rendezvous)
    patience = reception.patience
    patience.until(lambda: _listens(host, port, patience.left_s), poll_s=CONNECT_RETRY_S)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience.left_s))
        group = ProcessGroupGloo(
            _PatientStore(PrefixStore(prefix, store), patience),
            reception.rank,
            reception.world_size,
            timedelta(seconds=patience.left_s),
        )
        yield from _broadcasts(group, reception)
    except RuntimeError as error:
        patience.check()
        first_line = str(error).partition("\n")[0]
        raise WeightPushFailed(f"receiving weights from {reception.rendezvous} failed: {first_line}") from error


class _PatientStore(Store):
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


def _listens(host: str, port: int, left_s: float) -> bool:
    """Whether the publisher's store is up. TCPStore would retry on its own, and could not be aborted."""
    try:
        with socket.create_connection((host, port), timeout=min(left_s, 1.0)):
            return True
    except OSError:
        return False


def _broadcasts(group: Any, reception: Reception) -> Iterator[Arrived]:
    """The buckets in order, some under way at once."""
    under_way: deque[tuple[Any, torch.Tensor]] = deque()
    sizes = deque(wire_sizes(reception.manifest))
    try:
        while sizes or under_way:
            while sizes and len(under_way) < GLOO_BROADCASTS_AT_ONCE:
                wire = reception.buffer(sizes.popleft(), torch.device("cpu"))
                under_way.append((group.broadcast([wire], _from_publisher()), wire))
            work, wire = under_way[0]
            reception.patience.until(work.is_completed)
            work.wait()
            under_way.popleft()
            yield Arrived(wire)
    finally:
        if under_way:
            _break_connections(group, [work for work, _ in under_way])


def _break_connections(group: Any, works: list[Any]) -> None:
    """Fail pending broadcasts at once. Gloo has no abort, but an operation that times out closes every connection of
    its group; without this the group's destructor waits for the stalled ones."""
    options = _from_publisher()
    options.timeout = timedelta(milliseconds=1)
    works.append(group.broadcast([torch.zeros(1, dtype=torch.uint8)], options))
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and not all(work.is_completed() for work in works):
        time.sleep(POLL_S)


def _from_publisher() -> Any:
    options = BroadcastOptions()
    options.rootRank = PUBLISHER_RANK
    options.rootTensor = 0
    return options
