"""gloo: form a process group over TCP and broadcast each bucket in pieces, to all workers or to relays."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo

from penstock.errors import Unavailable, WeightPushFailed, first_line_of
from penstock.weights.deadline import Deadline
from penstock.weights.transports import (
    GLOO_PIECE_BYTES,
    GLOO_PIECES_AT_ONCE,
    PUBLISHER_RANK,
    GroupPlace,
    group_places,
    is_divided,
)
from penstock_learner.rendezvous import open_store
from penstock_learner.weights.push import PushTarget, num_ranks
from penstock_learner.weights.senders.sender import Shipment


class GlooSender:
    """Forms one group per push, or groups of `group_size` workers if there are more (penstock.weights.transports).

    The rendezvous is `host:port/prefix/group_size` of the store where all groups meet."""

    def __init__(self, host: str, group_size: int) -> None:
        self.host = host
        self.group_size = group_size
        self._numbers = itertools.count(1)
        self._store: Any = None
        self._prefix = ""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        timeout = timedelta(seconds=deadline.remaining_s)
        try:
            self._store = open_store(self.host, num_ranks(members), timeout)
        except Unavailable as error:
            raise WeightPushFailed(f"{error}; check learner.publish_host") from error
        self._prefix = f"push-{next(self._numbers)}"
        return f"{self.host}:{self._store.port}/{self._prefix}/{self.group_size}"

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Send to all workers, or to the relays. With relays it ends when all workers have all bytes: otherwise one
        that dies late would take those with it that get their bytes from it.

        Every operation gets the rest of the deadline, also because a group's destructor waits for those that were
        begun."""
        try:
            [place] = group_places(PUBLISHER_RANK, num_ranks(members), self.group_size)
            store = PrefixStore(f"{self._prefix}/{place.name}", self._store)
            group = _meet(store, place, self.host, deadline)
            in_flight: deque[Any] = deque()
            for wire in shipment.wires(deadline):
                for piece in wire.cpu().split(GLOO_PIECE_BYTES):
                    in_flight.append(_broadcast(group, piece, deadline))
                    if len(in_flight) == GLOO_PIECES_AT_ONCE:
                        in_flight.popleft().wait(_rest(deadline))
            if is_divided(num_ranks(members), self.group_size):
                in_flight.append(_barrier(group, deadline))
            for work in in_flight:
                work.wait(_rest(deadline))
        except RuntimeError as error:
            first_line = first_line_of(error)
            raise WeightPushFailed(f"the broadcast broke: {first_line}") from error

    def close(self, *, failed: bool) -> None:
        self._store = None


def _meet(store: Any, place: GroupPlace, host: str, deadline: Deadline) -> Any:
    """Form the group. Raises WeightPushFailed at the deadline.

    Gloo gives each worker the whole time to connect, one after the other. So the meeting has a separate thread, which
    is left behind at the deadline. It ends when a worker no longer connects."""
    met: Future[Any] = Future()

    def meet() -> None:
        try:
            met.set_result(ProcessGroupGloo(store, place.rank, place.num_ranks, _options(host, deadline.remaining_s)))
        except RuntimeError as error:
            met.set_exception(error)

    threading.Thread(target=meet, name="gloo-meeting", daemon=True).start()
    try:
        return met.result(deadline.remaining_s)
    except TimeoutError as error:
        deadline.check()
        raise WeightPushFailed("the workers did not meet in time") from error


def _broadcast(group: Any, piece: torch.Tensor, deadline: Deadline) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = PUBLISHER_RANK, 0, _rest(deadline)
    return group.broadcast([piece], options)


def _barrier(group: Any, deadline: Deadline) -> Any:
    options = BarrierOptions()
    options.timeout = _rest(deadline)
    return group.barrier(options)


def _rest(deadline: Deadline) -> timedelta:
    return timedelta(seconds=deadline.remaining_s)


def _options(host: str, timeout_s: float) -> Any:
    """The options of a group whose connections are accepted on `host` only. There is a thread for each operation, so
    that none waits for another before its time begins to count."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = GLOO_PIECES_AT_ONCE
    return options
