"""The interface of a sender, the bytes that it sends, and the servers that it sends them to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock_learner.weights.staging import StagedVersion


@dataclass(frozen=True)
class PushTarget:
    """A rollout server that takes part in a push."""

    server_id: str
    address: str
    devices: tuple[str, ...] = ("cpu",)
    """The device of each worker's weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Two processes with the same host id can map each other's memory."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """Transports by which it can receive."""
    nccl_version: str = ""
    """Version of its NCCL library. Empty if it cannot receive by `nccl`."""


@dataclass(frozen=True)
class Shipment:
    """The bytes to send: for each bucket either the staged bucket itself or a delta on another version."""

    manifest: weights_pb2.WeightManifest
    staged: StagedVersion
    deltas: tuple[torch.Tensor | None, ...] = ()

    def wires(self, deadline: Deadline) -> Iterator[torch.Tensor]:
        """Yield the bytes of each bucket in order, as soon as it is staged. They may be on the host or on a GPU."""
        for index in range(len(self.manifest.buckets)):
            delta = self.deltas[index] if self.deltas else None
            yield self.staged.bucket(index, deadline) if delta is None else delta


class Sender(Protocol):
    """Serves one push at a time: open, send, close. It lives as long as the publisher.

    A sender may keep its connections from push to push while the members stay the same. Every wait in `send` ends at
    the deadline. After a failure the next `open` starts from scratch."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        """Prepare to connect to the members' workers, whose ranks are 1, 2, … in order. Returns the rendezvous.

        It must not enter a collective, because members learn the rendezvous only afterwards."""
        ...

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Send every bucket to every worker. Raises WeightPushFailed if the transfer breaks."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the push. If it failed, drop everything that a dead or late member could still block."""
        ...


def num_ranks(members: Sequence[PushTarget]) -> int:
    """Return the number of ranks: the publisher and every worker."""
    return 1 + sum(len(member.devices) for member in members)
