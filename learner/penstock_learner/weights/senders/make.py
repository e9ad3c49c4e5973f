"""Senders by the name of their transport; imported late, since most need something the others do not have."""

from __future__ import annotations

import torch

from penstock.errors import WeightPushFailed
from penstock_learner.weights.senders.sender import Sender


def make_sender(transport: str, host: str, device: torch.device) -> Sender:
    """The sender of a transport for a publisher at this address and device."""
    if transport == "nccl":
        from penstock_learner.weights.senders.nccl import NcclSender

        return NcclSender(device)
    if transport == "cuda_ipc":
        from penstock_learner.weights.senders.cuda_ipc import CudaIpcSender

        return CudaIpcSender(device)
    if transport == "shm":
        from penstock_learner.weights.senders.shm import ShmSender

        return ShmSender()
    if transport == "gloo":
        from penstock_learner.weights.senders.gloo import GlooSender

        return GlooSender(host)
    raise WeightPushFailed(f"unknown transport {transport!r}")
