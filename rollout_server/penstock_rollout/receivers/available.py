"""Which transports a server can receive by."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from penstock.weights.transports import TRANSPORTS, host_id


def available_transports(devices: Sequence[str]) -> tuple[str, ...]:
    """Of an engine whose workers hold their weights on these devices."""
    can = {"gloo", "snapshot"}
    if host_id():
        can.add("shm")
    if "cpu" not in devices and importlib.util.find_spec("cupy") is not None:
        can |= {"nccl", "cuda_ipc"}
    return tuple(name for name in TRANSPORTS if name in can)
