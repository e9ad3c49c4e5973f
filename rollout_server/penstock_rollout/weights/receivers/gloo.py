"""gloo: join the publisher's process group over TCP and receive each bucket as a series of broadcasts.

In a push to many workers this one may be a relay, which hands each piece on to its own group
(penstock.weights.transports)."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, PrefixStore, ProcessGroupGloo, Store

from penstock.errors import WeightPushFailed, first_line_of
from penstock.machine import address_towards
from penstock.weights.transports import (
    GLOO_PIECE_BYTES,
    GLOO_PIECES_AT_ONCE,
    POLL_S,
    PUBLISHER_RANK,
    Deadline,
    GroupPlace,
    RunningChecksum,
    group_places,
    is_divided,
    wire_sizes,
)
from penstock_rollout.weights.stage import STORE_POLL_S, Arrived, Reception, connect_store

PIECE_POLL_S = 0.001
BREAK_TIMEOUT_S = 5.0


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield buckets in host memory. The rendezvous is `host:port/prefix/group_size`, with the publisher's store."""
    host, port, prefix, group_size = parse_rendezvous(reception.rendezvous)
    deadline, num_ranks = reception.deadline, reception.announcement.world_size
    try:
        store = connect_store(host, port, deadline)
        own_address = address_towards(host, port)

        def meet(place: GroupPlace) -> Any:
            interruptible = InterruptibleStore(PrefixStore(f"{prefix}/{place.name}", store), deadline)
            return ProcessGroupGloo(
                interruptible, place.rank, place.num_ranks, _options(own_address, deadline.remaining_s)
            )

        groups = [meet(place) for place in group_places(reception.rank, num_ranks, group_size)]
        yield from _broadcasts(groups, reception, ends_together=is_divided(num_ranks, group_size))
    except RuntimeError as error:
        deadline.check()
        first_line = first_line_of(error)
        raise WeightPushFailed(f"receiving weights from {reception.rendezvous} failed: {first_line}") from error


class InterruptibleStore(Store):
    """A store whose waits end at a Deadline or at its abort. Otherwise gloo's rendezvous could not be interrupted."""

    def __init__(self, inner: Any, deadline: Deadline) -> None:
        super().__init__()
        self._inner = inner
        self._deadline = deadline
        self._known: set[str] = set()
        """Keys that exist: gloo waits for a key and then gets it."""

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
        unknown = [key for key in keys if key not in self._known]
        if unknown:
            self._deadline.wait_until(lambda: self.check(unknown), STORE_POLL_S)
            self._known.update(unknown)


def parse_rendezvous(rendezvous: str) -> tuple[str, int, str, int]:
    parts = re.fullmatch(r"([^/]+):(\d+)/(.+)/(0*[1-9]\d*)", rendezvous)
    if parts is None:
        raise WeightPushFailed(
            f"rendezvous {rendezvous!r} is not host:port/prefix/group_size; use the same Penstock in every process"
        )
    return parts[1].strip("[]"), int(parts[2]), parts[3], int(parts[4])


def _options(own_address: str, timeout_s: float) -> Any:
    """Connections are accepted on the address on the way to the publisher. By default gloo takes that of the machine's
    name, which is 127.0.1.1 on Debian: relays and members on other machines could not connect. There is one thread for
    each concurrent piece, and one for the broadcast of `break_connections`."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")  # torch's own constructor reads it too
    options._devices = [gloo.create_device(**({"interface": interface} if interface else {"hostname": own_address}))]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = GLOO_PIECES_AT_ONCE + 1
    return options


@dataclass(frozen=True)
class _BucketPiece:
    """A part of a bucket, sent by one broadcast."""

    wire: torch.Tensor
    """The memory of the whole bucket."""
    bytes: torch.Tensor
    is_last: bool
    checksum: RunningChecksum | None
    """Running checksum of the bucket. None for a delta, which is hashed after it was decoded."""


def _pieces(reception: Reception) -> Iterator[_BucketPiece]:
    """Yield the pieces in the order in which they are sent. A bucket is allocated with its first piece."""
    manifest = reception.manifest
    for bucket, num_bytes in zip(manifest.buckets, wire_sizes(manifest), strict=True):
        wire = reception.buffer(num_bytes, torch.device("cpu"))
        checksum = None if bucket.wire_bytes else RunningChecksum(manifest.checksum)
        *others, last = wire.split(GLOO_PIECE_BYTES)
        yield from (_BucketPiece(wire, piece, False, checksum) for piece in others)
        yield _BucketPiece(wire, last, True, checksum)


def _broadcasts(groups: Sequence[Any], reception: Reception, *, ends_together: bool) -> Iterator[Arrived]:
    """Yield the buckets in order. Several pieces are in flight at once. A relay has a second group, to which it hands
    each piece on. With `ends_together` the last bucket is followed by a barrier of each group. A relay enters that of
    its own group first, so the publisher's barrier ends when all workers have all bytes."""
    source, deadline = groups[0], reception.deadline
    in_flight: deque[tuple[Any, _BucketPiece]] = deque()
    relay = _Relay(groups[1], deadline) if len(groups) > 1 else None
    pieces, is_complete = _pieces(reception), False
    try:
        while True:
            for piece in itertools.islice(pieces, GLOO_PIECES_AT_ONCE - len(in_flight)):
                in_flight.append((source.broadcast([piece.bytes], _from_sender()), piece))
            if not in_flight:
                break
            work, piece = in_flight[0]
            _wait(work, deadline)
            in_flight.popleft()
            if relay is not None:
                relay.add(piece.bytes)
            if piece.checksum is not None:
                piece.checksum.update(piece.bytes.numpy())
            if piece.is_last:
                yield Arrived(piece.wire, piece.checksum.value if piece.checksum else "")
        if relay is not None:
            relay.finish()
        if ends_together:
            _wait(source.barrier(), deadline)
        is_complete = True
    finally:
        if not is_complete:
            break_connections(source, [work for work, _ in in_flight])
            if relay is not None:
                break_connections(relay.group, list(relay.works))


class _Relay:
    """Broadcasts pieces to the group of a relay. As many are in flight as from the publisher, so a slow worker
    slows the publisher down instead of filling the relay's memory."""

    def __init__(self, group: Any, deadline: Deadline) -> None:
        self.group = group
        self.deadline = deadline
        self.works: deque[Any] = deque()

    def add(self, piece: torch.Tensor) -> None:
        if len(self.works) == GLOO_PIECES_AT_ONCE:
            self._wait_for_first()
        self.works.append(self.group.broadcast([piece], _from_sender()))

    def finish(self) -> None:
        """Wait until all workers of the group have all pieces."""
        while self.works:
            self._wait_for_first()
        _wait(self.group.barrier(), self.deadline)

    def _wait_for_first(self) -> None:
        _wait(self.works[0], self.deadline)
        self.works.popleft()


def _wait(work: Any, deadline: Deadline) -> None:
    deadline.wait_until(work.is_completed, PIECE_POLL_S)
    work.wait()


def break_connections(group: Any, works: list[Any]) -> None:
    """Make pending broadcasts fail at once; otherwise the group's destructor would wait for them. Gloo has no abort,
    but an operation that times out closes every connection of its group. The group needs one idle thread for this
    operation. It is a gather to this rank, because no one sends for it: gloo ends a process that gets more bytes than
    it expects, so a broadcast could meet the next piece of a sender that goes on."""
    options = GatherOptions()
    options.rootRank = group.rank()
    options.timeout = timedelta(milliseconds=1)
    gathered = [torch.zeros(1, dtype=torch.uint8) for _ in range(group.size())]
    works = [*works, group.gather([gathered], [torch.zeros(1, dtype=torch.uint8)], options)]
    ends_at = time.monotonic() + BREAK_TIMEOUT_S
    while time.monotonic() < ends_at and not all(work.is_completed() for work in works):
        time.sleep(POLL_S)


def _from_sender() -> Any:
    options = BroadcastOptions()
    options.rootRank = PUBLISHER_RANK
    options.rootTensor = 0
    return options
