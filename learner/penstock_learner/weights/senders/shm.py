"""shm: members on the same host map the publisher's buckets. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import WeightPushFailed
from penstock.weights.deadline import Deadline
from penstock_learner.weights.memory import SharedMemory
from penstock_learner.weights.senders.sender import PushTarget, Shipment


class ShmSender:
    """The rendezvous is a path under /proc. Members map that memory when it is sealed."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        memory = shipment.staged.memory
        if not isinstance(memory, SharedMemory):
            raise WeightPushFailed(f"shm needs buckets in shared memory, not {memory.kind}; unset weights.staging")
        return memory.path

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Wait until the buckets are sealed. The members then map them without further help."""
        shipment.staged.wait_sealed(deadline)

    def close(self, *, failed: bool) -> None:
        pass
