"""The names of the weight transports, and what each needs. The learner has a sender, the server a receiver for each.

| name     | how weights are sent                       | needs                                                        |
|----------|--------------------------------------------|--------------------------------------------------------------|
| nccl     | NCCL broadcast (CuPy), GPU to GPU          | CuPy; a GPU of its own for the publisher and for each worker |
| cuda_ipc | one copy inside a GPU                      | CuPy; publisher and worker on the same GPU of one host       |
| shm      | sealed shared memory, mapped without copy  | publisher and worker on one host, one user, one pid namespace|
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
"""Rank of the publisher in every collective. The members' workers are 1, 2, …"""
GLOO_PIECE_BYTES = 4 * 2**20
"""Size of the pieces in which a bucket is sent. The receiver hashes each while it is in the processor's cache."""
GLOO_PIECES_AT_ONCE = 8
"""Number of pieces that are in flight at once."""


@functools.cache
def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


@functools.cache
def host_id() -> str:
    """Return an id that is equal for processes that can map each other's memory: same boot, pid namespace and user.

    Empty where there is no /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot.read_text().strip()}/{namespace}/{os.getuid()}"
