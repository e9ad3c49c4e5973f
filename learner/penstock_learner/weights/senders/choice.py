"""Choose the transport of a push, the fastest that every member supports, and create its sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.errors import WeightPushFailed
from penstock.weights.cuda import libraries
from penstock.weights.cuda.nccl_group import version_mismatch
from penstock_learner.weights.memory import MemoryKind
from penstock_learner.weights.push import PushTarget
from penstock_learner.weights.senders.sender import Sender, ShmSender


@dataclass(frozen=True)
class PublisherPlace:
    """The facts about the publisher by which `auto` chooses."""

    host_id: str
    device: str
    """`cpu`, or its GPU's UUID."""
    memory: MemoryKind
    has_cupy: bool
    nccl_version: str = ""
    """Version of the publisher's NCCL library. Empty if it has none."""


def choose_transport(place: PublisherPlace, members: Sequence[PushTarget]) -> tuple[str, str]:
    """Return the transport and the reason for it."""
    devices = [device for member in members for device in member.devices]

    def all_can(transport: str) -> bool:
        return all(transport in member.transports for member in members)

    if place.has_cupy and place.device != "cpu":
        if all_can("cuda_ipc") and set(devices) == {place.device} and place.memory == "device":
            return "cuda_ipc", "every worker shares the publisher's GPU"
        are_distinct = len({*devices, place.device, "cpu"}) == len(devices) + 2
        has_same_nccl = place.nccl_version != "" and all(m.nccl_version == place.nccl_version for m in members)
        if all_can("nccl") and are_distinct and has_same_nccl:
            return "nccl", "publisher and workers have one GPU each"
    if place.memory == "shared" and all_can("shm") and all(m.host_id == place.host_id for m in members):
        return "shm", "every member is on the publisher's host"
    return "gloo", _why_gloo(place, members)


def _why_gloo(place: PublisherPlace, members: Sequence[PushTarget]) -> str:
    others = {member.nccl_version for member in members if member.nccl_version} - {place.nccl_version}
    if place.nccl_version and others:
        return version_mismatch(place.nccl_version, ", ".join(sorted(others)))
    return "members are on several hosts, or lack what a faster transport needs"


def why_unable(transport: str, member: PushTarget) -> str:
    """Return why the member cannot receive by the transport, or an empty string if it can."""
    if transport not in member.transports:
        return f"it cannot receive by {transport}; set weights.transport to auto, or install what the transport needs"
    if transport == "nccl" and (own := libraries.nccl_version()) != member.nccl_version:
        return version_mismatch(own, member.nccl_version)
    return ""


def make_sender(transport: str, host: str, device: torch.device, gloo_group_size: int) -> Sender:
    """Create the sender of a transport, for a publisher with this address and device.

    A sender is imported on use, because each has its own dependencies."""
    if transport == "nccl":
        from penstock_learner.weights.senders.nccl import NcclSender

        return NcclSender(device)
    if transport == "cuda_ipc":
        from penstock_learner.weights.senders.cuda_ipc import CudaIpcSender

        return CudaIpcSender(device)
    if transport == "shm":
        return ShmSender()
    if transport == "gloo":
        from penstock_learner.weights.senders.gloo import GlooSender

        return GlooSender(host, gloo_group_size)
    raise WeightPushFailed(f"unknown transport {transport!r}")
