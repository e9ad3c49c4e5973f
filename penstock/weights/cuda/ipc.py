"""CUDA IPC: GPU memory of one process, mapped by another on the same GPU.

    bucket | bucket | … | 16 bytes identity | 8 bytes number of buckets that are ready

Each bucket starts at a multiple of 512. The identity is a hash of run, term, version and sizes: a handle can come to
mean other memory once its owner has freed it, and a member must not take one version for another.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import xxhash

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.manifest import wire_sizes

BUCKET_ALIGNMENT = 512
HEADER = struct.Struct("<16sq")
MAX_KEPT = 2
"""A publisher fills one set of buckets while another is pushed."""


@dataclass(frozen=True)
class IpcOffer:
    """The rendezvous of cuda_ipc."""

    handle: str
    """Hex."""
    device: str
    """UUID of the GPU."""
    num_bytes: int
    """Of the buckets as they lie: where the header is."""
    num_ready: int
    """Buckets that were ready when the offer was made. The header has the last word."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> IpcOffer:
        try:
            said = json.loads(text)
            return IpcOffer(str(said["handle"]), str(said["device"]), int(said["num_bytes"]), int(said["num_ready"]))
        except (ValueError, KeyError, TypeError) as error:
            raise WeightPushFailed(f"the rendezvous of cuda_ipc cannot be read: {error!r}") from error


def identity(manifest: weights_pb2.WeightManifest) -> bytes:
    said = [manifest.run, manifest.term, manifest.policy_version, wire_sizes(manifest)]
    return xxhash.xxh3_128_digest(json.dumps(said).encode())


def export_handle(pointer: int) -> bytes:
    """The handle of the allocation that starts at `pointer`."""
    handle: bytes = libraries.runtime().ipcGetMemHandle(pointer)
    return handle


class Mappings:
    """Allocations of publishers, mapped into this process and kept: mapping costs ten times what copying does.

    A publisher uses its memory again, so the same few handles come back. At most MAX_KEPT that nobody uses stay, and
    none of an earlier term: what a dead publisher leaves is held only until the next one pushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Mapping] = {}

    @contextmanager
    def opened(self, handle: bytes, device_index: int, term: int) -> Iterator[int]:
        """Another process' allocation for a while; yields its address here."""
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
        """Let go of all that nobody uses."""
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
            f"the publisher's GPU memory cannot be mapped ({error}); cuda_ipc needs a living publisher on this host"
        ) from error
