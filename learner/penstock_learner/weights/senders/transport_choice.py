"""Choose the transport of a push: the fastest that every member supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_learner.weights.memory import MemoryKind
from penstock_learner.weights.senders.sender import PushTarget


@dataclass(frozen=True)
class PublisherPlace:
    """The facts about the publisher by which `auto` chooses."""

    host_id: str
    device: str
    """`cpu`, or its GPU's UUID."""
    memory: MemoryKind
    has_cupy: bool


def choose_transport(place: PublisherPlace, members: Sequence[PushTarget]) -> tuple[str, str]:
    """Return the transport and the reason for it."""
    devices = [device for member in members for device in member.devices]

    def all_can(transport: str) -> bool:
        return all(transport in member.transports for member in members)

    if place.has_cupy and place.memory == "device" and place.device != "cpu":
        if all_can("cuda_ipc") and set(devices) == {place.device}:
            return "cuda_ipc", "every worker shares the publisher's GPU"
        are_distinct = len({*devices, place.device}) == len(devices) + 1
        if all_can("nccl") and are_distinct and "cpu" not in devices:
            return "nccl", "publisher and workers have one GPU each"
    if place.memory == "shared" and all_can("shm") and all(m.host_id == place.host_id for m in members):
        return "shm", "every member is on the publisher's host"
    return "gloo", "members are on several hosts, or lack what a faster transport needs"
