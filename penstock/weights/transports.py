"""The weight transports by name, and what each needs. Publisher and rollout server each have their end of every one.

| name     | carries weights by                         | needs                                                        |
|----------|--------------------------------------------|--------------------------------------------------------------|
| nccl     | NCCL broadcast (CuPy), GPU to GPU          | CuPy; a GPU of its own for the publisher and for each worker |
| cuda_ipc | one copy inside a GPU                      | CuPy; publisher and worker on the same GPU of one host       |
| shm      | sealed shared memory, mapped, not copied   | publisher and worker on one host, one user, one pid namespace|
| gloo     | TCP broadcast through host memory          | a network                                                    |
| snapshot | a safetensors file                         | a volume that both sides mount                               |
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

TRANSPORTS = ("nccl", "cuda_ipc", "shm", "gloo", "snapshot")
"""In the order in which `auto` prefers them."""
PUBLISHER_RANK = 0
"""Of every collective; the members' workers are 1, 2, …"""
GLOO_PIECE_BYTES = 4 * 2**20
"""A bucket travels in pieces of this size, each hashed while it is in the cache of the processor that took it in."""
GLOO_PIECES_AT_ONCE = 8
"""Pieces that are on their way while those before are taken."""


@functools.cache
def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


@functools.cache
def host_id() -> str:
    """Equal on two processes exactly when they can map each other's memory: one boot, pid namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot.read_text().strip()}/{namespace}/{os.getuid()}"
