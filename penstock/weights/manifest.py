"""The bucket layout of a weight push.

Tensors are packed into buckets of at most `bucket_bytes`, in the given order. A larger tensor gets its own bucket. Each
tensor is aligned to 16 bytes and lies inside one bucket. The manifest describes the layout completely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.v1 import weights_pb2
from penstock.weights.checksums import XXH3_PIECES

ALIGNMENT = 16
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1}


@dataclass(frozen=True)
class TensorShape:
    name: str
    dtype: str
    """Name of the type in safetensors, such as BF16."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


def build_manifest(
    run: str, policy_version: int, term: int, tensors: Iterable[TensorShape], bucket_bytes: int
) -> weights_pb2.WeightManifest:
    """Lay out the tensors. The checksums come with the commit, when every bucket has been gathered."""
    manifest = weights_pb2.WeightManifest(run=run, policy_version=policy_version, term=term, checksum=XXH3_PIECES)
    used = 0
    for tensor in tensors:
        padded = -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        if not manifest.buckets or used + padded > bucket_bytes:
            manifest.buckets.add()
            used = 0
        manifest.tensors.add(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bucket=len(manifest.buckets) - 1,
            offset_bytes=used,
            num_bytes=tensor.num_bytes,
        )
        used += padded
        manifest.buckets[-1].num_bytes = used
    return manifest


def allocate_buckets(manifest: weights_pb2.WeightManifest) -> list[NDArray[np.uint8]]:
    """Allocate host buffers. They are zeroed, so alignment padding has the same hash everywhere."""
    return [np.zeros(bucket.num_bytes, dtype=np.uint8) for bucket in manifest.buckets]


def wire_sizes(manifest: weights_pb2.WeightManifest) -> list[int]:
    """Return the number of bytes sent for each bucket: the size of its delta, or of the whole bucket."""
    return [bucket.wire_bytes or bucket.num_bytes for bucket in manifest.buckets]


def bucket_offsets(sizes: Iterable[int], alignment: int) -> list[int]:
    """Return the offset of each bucket in one block of memory, aligned, and the offset after the last bucket."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    return offsets


def item_bytes(manifest: weights_pb2.WeightManifest) -> int:
    """Return the size of the items that a delta consists of: that of the smallest dtype in the manifest."""
    return min(ITEM_BYTES[dtype] for dtype in {spec.dtype for spec in manifest.tensors})
