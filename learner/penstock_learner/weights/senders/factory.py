"""Create a sender by the name of its transport. A sender is imported on use, because each has its own dependencies."""

from __future__ import annotations

import torch

from penstock.errors import WeightPushFailed
from penstock_learner.weights.senders.sender import Sender


def make_sender(transport: str, host: str, device: torch.device, gloo_group_size: int) -> Sender:
    """Create the sender of a transport, for a publisher with this address and device."""
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

        return GlooSender(host, gloo_group_size)
    raise WeightPushFailed(f"unknown transport {transport!r}")
