"""The interface of a receiver: its input, and the buckets that it yields as they arrive.

A receiver knows nothing about engines. Each of its waits has a deadline and ends early when the stage is aborted. So if
a publisher stalls or never connects, it costs no more than a waiting thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock.weights.transports import TRANSPORTS


@dataclass(frozen=True)
class Reception:
    """One transfer, as one worker of a member sees it."""

    announcement: weights_pb2.AnnounceRequest
    device: torch.device
    """Where to put the buckets: the engine's GPU if a second set of weights fits there, else host memory."""
    deadline: Deadline
    worker: int = 0
    """Index of this worker within the member."""
    spare: list[torch.Tensor] = field(default_factory=list)
    """Buffers of an earlier version. Filling them again is faster than using new memory."""
    worker_device: torch.device = torch.device("cpu")
    """Where the engine keeps its weights. The receiving thread uses this device, with a stream of its own."""

    @property
    def manifest(self) -> weights_pb2.WeightManifest:
        return self.announcement.manifest

    @property
    def rendezvous(self) -> str:
        """How to find the publisher. The sender of the same transport documents the format."""
        return self.announcement.rendezvous

    @property
    def rank(self) -> int:
        """Rank of this worker in the transfer; the publisher is rank 0."""
        return self.announcement.rank + self.worker

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised bucket. Host memory is pinned if there is a GPU to copy from or to."""
        for index, tensor in enumerate(self.spare):
            if tensor.numel() == num_bytes and tensor.device == device:
                return self.spare.pop(index)
        pin = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


@dataclass(frozen=True)
class Arrived:
    """The bytes of one bucket, as they were sent."""

    wire: torch.Tensor
    """Flat uint8 of the size that the manifest gives for the transfer, on `Reception.device` or in host memory."""
    checksum: str = ""
    """Checksum of the bytes, if the receiver knows it: it hashed them on arrival, or the publisher's header has it."""
    is_shared: bool = False
    """The bytes are the publisher's own sealed pages. They need no second hash, and cannot be reused as a buffer."""


Receiver = Callable[[Reception], Iterator[Arrived]]
"""Yields the buckets in the manifest's order."""


def find_receiver(transport: str) -> Receiver:
    """Return `receive` of the transport's module. Transports have different dependencies, so it is imported here."""
    if transport not in TRANSPORTS:
        raise WeightPushFailed(f"unknown transport {transport!r}; this server knows {', '.join(TRANSPORTS)}")
    receiver: Receiver = import_module(f"penstock_rollout.weights.receivers.{transport}").receive
    return receiver
