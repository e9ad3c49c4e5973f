"""The publisher's end of a transport, and what it ships."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.v1 import weights_pb2
from penstock.weights.patience import Patience
from penstock_learner.weights.staging import StagedVersion


@dataclass(frozen=True)
class PushTarget:
    """A member of the push."""

    server_id: str
    address: str
    devices: tuple[str, ...] = ("cpu",)
    """Where each of its workers holds its weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Equal on processes that can map each other's memory."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """What it can receive by."""


@dataclass(frozen=True)
class Shipment:
    """What travels: whole buckets as they are staged, or, by bucket, a delta on the version before."""

    manifest: weights_pb2.WeightManifest
    staged: StagedVersion
    deltas: tuple[torch.Tensor | None, ...] = ()

    def wires(self, patience: Patience) -> Iterator[torch.Tensor]:
        """The bytes of each bucket, in order, each once it is staged; where the version was staged, host or GPU."""
        for index in range(len(self.manifest.buckets)):
            delta = self.deltas[index] if self.deltas else None
            yield self.staged.bucket(index, patience) if delta is None else delta


class Sender(Protocol):
    """Lives as long as the publisher and serves one push at a time: open, send, close.

    A sender may keep its connections from push to push while the members are the same. Whatever `send` waits for ends
    at the patience's deadline. After a failure the next `open` starts afresh."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        """Prepare to meet the members' workers, ranks 1, 2, … in order; returns what they need to meet us.

        Enters no collective: members learn the answer only afterwards."""
        ...

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        """Bring every bucket to every worker. Raises WeightPushFailed when the transfer breaks."""
        ...

    def close(self, *, failed: bool) -> None:
        """The push is over. `failed`: drop everything that a dead or late member could still hold up."""
        ...


def num_ranks(members: Sequence[PushTarget]) -> int:
    """The publisher and every worker."""
    return 1 + sum(len(member.devices) for member in members)
