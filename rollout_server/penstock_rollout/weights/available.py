"""The transports by which a server can receive weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from penstock.weights.cuda import libraries
from penstock.weights.transports import TRANSPORTS, has_cupy, host_id


def available_transports(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the transports for an engine whose workers keep their weights on `devices`."""
    names = {"gloo", "snapshot"}
    if host_id():
        names.add("shm")
    if "cpu" not in devices and has_cupy():
        names.add("cuda_ipc")
        if _nccl_version():
            names.add("nccl")
    return tuple(name for name in TRANSPORTS if name in names)


def reported_nccl_version(devices: Sequence[str]) -> str:
    """Return the version of NCCL if such an engine can receive by `nccl`, else an empty string."""
    return _nccl_version() if "nccl" in available_transports(devices) else ""


@cache
def _nccl_version() -> str:
    return libraries.nccl_version()
