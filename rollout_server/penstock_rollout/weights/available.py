"""Which transports a server can receive by."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.weights.transports import TRANSPORTS, has_cupy, host_id


def available_transports(devices: Sequence[str]) -> tuple[str, ...]:
    """Of an engine whose workers hold their weights on these devices."""
    can = {"gloo", "snapshot"}
    if host_id():
        can.add("shm")
    if "cpu" not in devices and has_cupy():
        can |= {"nccl", "cuda_ipc"}
    return tuple(name for name in TRANSPORTS if name in can)
