"""What a receiver is given and what it gives: the wire bytes of every bucket, in order, as they arrive.

Nothing here knows an engine. Every wait has a deadline and ends early when the stage is aborted: a publisher that
stalls or never comes costs a thread for a moment, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.patience import Patience
from penstock.weights.transports import TRANSPORTS


@dataclass(frozen=True)
class Reception:
    """One transfer, seen from one worker of a member."""

    manifest: weights_pb2.WeightManifest
    rendezvous: str
    """What the sender of the same transport made; its docstring says how it reads."""
    rank: int
    """This worker's; the publisher is 0."""
    world_size: int
    device: torch.device
    """Where the buckets shall lie: the engine's GPU when it has room for a second set, else host memory."""
    patience: Patience
    spare: list[torch.Tensor] = field(default_factory=list)
    """Buffers of an earlier version, to be filled again: touching new memory costs more than filling old."""
    worker_device: torch.device = torch.device("cpu")
    """Where the engine's own weights lie. The calling thread has it as its current device, with a stream of its own."""

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """An uninitialised bucket; pinned in host memory that a GPU copies to or from."""
        for index, tensor in enumerate(self.spare):
            if tensor.numel() == num_bytes and tensor.device == device:
                return self.spare.pop(index)
        pin = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


@dataclass(frozen=True)
class Arrived:
    """One bucket's bytes: flat uint8, of the size that the manifest says travels, on `device` or in host memory."""

    wire: torch.Tensor
    checksum: str = ""
    """Set where the receiver has it already: of bytes that it hashed as they came, or of `is_shared` ones."""
    is_shared: bool = False
    """The bytes are the publisher's own, sealed pages: they need no second hash, and cannot be filled again."""


Receiver = Callable[[Reception], Iterator[Arrived]]
"""Yields the buckets in the manifest's order."""


def find_receiver(transport: str) -> Receiver:
    """`receive` of the transport's module, imported late: most need something the others do not have."""
    if transport not in TRANSPORTS:
        raise WeightPushFailed(f"unknown transport {transport!r}; this server knows {', '.join(TRANSPORTS)}")
    receiver: Receiver = import_module(f"penstock_rollout.weights.receivers.{transport}").receive
    return receiver
