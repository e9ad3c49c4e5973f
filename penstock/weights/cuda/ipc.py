"""CUDA IPC: one process maps GPU memory that another process on the same GPU has allocated.

    bucket | bucket | … | 16 bytes identity | 8 bytes number of ready buckets

Each bucket starts at a multiple of 512. The identity is a hash of run, term, version and sizes. It keeps a member from
taking one version for another, for example when the owner has freed the memory and the handle refers to new memory.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.manifest import wire_sizes
from penstock.weights.transports import Rendezvous

BUCKET_ALIGNMENT = 512
HEADER = struct.Struct("<16sq")
MAX_KEPT = 2
"""Maximum number of unused mappings. Two, because a publisher fills one set of buckets while it pushes another."""


@dataclass(frozen=True)
class IpcOffer(Rendezvous):
    """The rendezvous of cuda_ipc."""

    handle: str
    """The IPC handle, in hex."""
    device: str
    """UUID of the GPU."""
    num_bytes: int
    """Size of the buckets with their alignment, which is the offset of the header."""
    num_ready: int
    """Number of buckets that were ready when the offer was made. The header decides."""


def identity(manifest: weights_pb2.WeightManifest) -> bytes:
    """Return the identity of a version for the header."""
    hashed = [manifest.run, manifest.term, manifest.policy_version, wire_sizes(manifest)]
    return xxhash.xxh3_128_digest(json.dumps(hashed).encode())


def export_handle(pointer: int) -> bytes:
    """Return the IPC handle of the allocation that starts at `pointer`."""
    handle: bytes = libraries.runtime().ipcGetMemHandle(pointer)
    return handle


class Mappings:
    """Maps publishers' allocations into this process and keeps the mappings, because mapping costs ten times a copy.

    A publisher reuses its memory, so the same few handles come back. At most MAX_KEPT unused mappings are kept, and
    none of an earlier term: the memory of a dead publisher is released when the next one pushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Mapping] = {}

    @contextmanager
    def opened(self, handle: bytes, device_index: int, term: int) -> Iterator[int]:
        """Map another process's allocation. Yields its address in this process."""
        mapping = self._take(handle, device_index, term)
        try:
            yield mapping.pointer
        except BaseException:
            mapping.is_trusted = False
            raise
        finally:
            with self._lock:
                mapping.num_users -= 1
                self._trim(term)

    def close(self) -> None:
        """Close all unused mappings."""
        with self._lock:
            for mapping in self._mapped.values():
                mapping.is_trusted = False
            self._trim(0)

    def _take(self, handle: bytes, device_index: int, term: int) -> _Mapping:
        with self._lock:
            self._trim(term)
            mapping = self._mapped.pop(handle, None) or _Mapping(_open(handle, device_index), term)
            mapping.num_users += 1
            self._mapped[handle] = mapping  # the newest is last
            return mapping

    def _trim(self, term: int) -> None:
        idle = [(handle, mapping) for handle, mapping in self._mapped.items() if not mapping.num_users]
        kept = [mapping for _, mapping in idle if mapping.is_trusted and mapping.term >= term][-MAX_KEPT:]
        for handle, mapping in idle:
            if mapping not in kept:
                del self._mapped[handle]
                libraries.runtime().ipcCloseMemHandle(mapping.pointer)


@dataclass(eq=False)
class _Mapping:
    pointer: int
    term: int
    num_users: int = 0
    is_trusted: bool = True


def _open(handle: bytes, device_index: int) -> int:
    runtime = libraries.runtime()
    runtime.setDevice(device_index)
    try:
        return int(runtime.ipcOpenMemHandle(handle))
    except (RuntimeError, ValueError) as error:
        raise WeightPushFailed(
            f"the publisher's GPU memory cannot be mapped ({error}); cuda_ipc needs a running publisher on this host"
        ) from error
