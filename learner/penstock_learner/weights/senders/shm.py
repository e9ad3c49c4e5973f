"""shm: members of the same host map the publisher's buckets. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import WeightPushFailed
from penstock.weights.patience import Patience
from penstock_learner.weights.memory import SharedMemory
from penstock_learner.weights.senders.sender import PushTarget, Shipment


class ShmSender:
    """The rendezvous is a path under /proc to the memory, which members map once it is sealed."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        memory = shipment.staged.memory
        if not isinstance(memory, SharedMemory):
            raise WeightPushFailed(f"shm needs buckets in shared memory, not {memory.kind}; unset weights.staging")
        return memory.path

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        """The members map the pages on their own, as soon as they are sealed."""
        patience.until(shipment.staged.sealed.is_set)

    def close(self, *, failed: bool) -> None:
        pass
