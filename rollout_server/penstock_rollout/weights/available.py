"""The transports by which a server can receive weights."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.weights.transports import TRANSPORTS, has_cupy, host_id


def available_transports(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the transports for an engine whose workers keep their weights on `devices`."""
    names = {"gloo", "snapshot"}
    if host_id():
        names.add("shm")
    if "cpu" not in devices and has_cupy():
        names |= {"nccl", "cuda_ipc"}
    return tuple(name for name in TRANSPORTS if name in names)
