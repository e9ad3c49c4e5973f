"""gloo: a process group over TCP and one broadcast a piece of a bucket."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not listed
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from penstock.errors import WeightPushFailed
from penstock.weights.patience import Patience
from penstock.weights.transports import GLOO_PIECE_BYTES, GLOO_PIECES_AT_ONCE, PUBLISHER_RANK
from penstock_learner.weights.senders.sender import PushTarget, Shipment, num_ranks


class GlooSender:
    """A group a push. The rendezvous is `host:port/prefix` of the store at which it forms."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._numbers = itertools.count(1)
        self._store: Any = None
        self._prefix = ""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        timeout = timedelta(seconds=patience.left_s)
        # Port 0: the store binds a free port itself; one that was probed before can be taken meanwhile.
        self._store = TCPStore(
            self.host, 0, num_ranks(members), is_master=True, timeout=timeout, wait_for_workers=False
        )
        self._prefix = f"push-{next(self._numbers)}"
        return f"{self.host}:{self._store.port}/{self._prefix}"

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        try:
            store = PrefixStore(self._prefix, self._store)
            group: Any = ProcessGroupGloo(store, 0, num_ranks(members), timedelta(seconds=patience.left_s))
            under_way: deque[Any] = deque()
            for wire in shipment.wires(patience):
                for piece in wire.cpu().split(GLOO_PIECE_BYTES):
                    under_way.append(group.broadcast(piece, PUBLISHER_RANK))
                    if len(under_way) == GLOO_PIECES_AT_ONCE:
                        under_way.popleft().wait(timedelta(seconds=patience.left_s))
            for work in under_way:
                work.wait(timedelta(seconds=patience.left_s))
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise WeightPushFailed(f"the broadcast broke: {first_line}") from error

    def close(self, *, failed: bool) -> None:
        self._store = None
