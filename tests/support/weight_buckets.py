"""The buckets of a weight version in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.v1 import weights_pb2


def allocate_buckets(manifest: weights_pb2.WeightManifest) -> list[NDArray[np.uint8]]:
    """Zeroed buffers, so that padding has the same hash everywhere."""
    return [np.zeros(bucket.num_bytes, dtype=np.uint8) for bucket in manifest.buckets]


def packed_buckets(
    manifest: weights_pb2.WeightManifest, weights: Mapping[str, NDArray[np.float32]]
) -> list[NDArray[np.uint8]]:
    """The tensors of a version, by name, where the manifest puts them."""
    buckets = allocate_buckets(manifest)
    for spec in manifest.tensors:
        raw = weights[spec.name].reshape(-1).view(np.uint8)
        buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes] = raw
    return buckets
