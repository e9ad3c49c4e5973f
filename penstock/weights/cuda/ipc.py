"""CUDA IPC: GPU memory of one process, mapped by another on the same GPU.

    bucket | bucket | … | 16 bytes identity | 8 bytes number of buckets that are ready

Each bucket starts at a multiple of 512. The identity is a hash of run, term, version and sizes: a handle can come to
mean other memory once its owner has freed it, and a member must not take one version for another.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import xxhash

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.manifest import wire_sizes

BUCKET_ALIGNMENT = 512
HEADER = struct.Struct("<16sq")


@dataclass(frozen=True)
class IpcOffer:
    """The rendezvous of cuda_ipc."""

    handle: str
    """Hex."""
    device: str
    """UUID of the GPU."""
    offsets: list[int]
    """Of each bucket, and of the header after the last."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> IpcOffer:
        try:
            said = json.loads(text)
            offsets = [int(offset) for offset in said["offsets"]]
            return IpcOffer(str(said["handle"]), str(said["device"]), offsets)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightPushFailed(f"the rendezvous of cuda_ipc cannot be read: {error!r}") from error


def bucket_offsets(sizes: Sequence[int]) -> list[int]:
    """Offset of each bucket, and of the header after the last."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT)
    return offsets


def identity(manifest: weights_pb2.WeightManifest) -> bytes:
    said = [manifest.run, manifest.term, manifest.policy_version, wire_sizes(manifest)]
    return xxhash.xxh3_128_digest(json.dumps(said).encode())


def export_handle(pointer: int) -> bytes:
    """The handle of the allocation that starts at `pointer`."""
    handle: bytes = libraries.runtime().ipcGetMemHandle(pointer)
    return handle


@contextmanager
def opened(handle: bytes, device_index: int) -> Iterator[int]:
    """Map another process' allocation for a while; yields its address here."""
    runtime = libraries.runtime()
    runtime.setDevice(device_index)
    try:
        pointer = int(runtime.ipcOpenMemHandle(handle))
    except (RuntimeError, ValueError) as error:
        raise WeightPushFailed(
            f"the publisher's GPU memory cannot be mapped ({error}); cuda_ipc needs a living publisher on this host"
        ) from error
    try:
        yield pointer
    finally:
        runtime.ipcCloseMemHandle(pointer)
