"""Make a shipment that contains only the changes since another version."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import item_bytes
from penstock_learner.weights.delta_encoding import encode
from penstock_learner.weights.senders.sender import Shipment
from penstock_learner.weights.staging import StagedVersion, beside_training

logger = logging.getLogger(__name__)
NUM_TRIED = 3
"""If none of the first buckets is smaller as a delta, the others are not compared."""


def delta_shipment(staged: StagedVersion, base: StagedVersion, deadline: Deadline) -> Shipment:
    """Send each bucket as a delta on `base`, or whole if the delta is not smaller.

    Buckets are encoded as soon as they are staged, where they are: on the GPU, or in host memory. Whatever hinders
    that, such as a lack of memory, is logged, and the buckets are sent whole."""
    if base is staged or not base.is_sealed or not _has_same_layout(base.manifest, staged.manifest):
        return Shipment(staged.manifest, staged)
    manifest = weights_pb2.WeightManifest()
    manifest.CopyFrom(staged.manifest)
    manifest.base_version = base.policy_version
    deltas: list[torch.Tensor | None] = []

    def encoded(index: int) -> torch.Tensor | None:
        return _encoded(base.memory.buckets[index], staged.bucket(index, deadline), item_bytes(manifest))

    num_buckets = len(manifest.buckets)
    num_threads = 1 if base.memory.kind == "device" else torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="delta") as threads:
            deltas += threads.map(encoded, range(min(NUM_TRIED, num_buckets)))
            if any(delta is not None for delta in deltas):
                deltas += threads.map(encoded, range(NUM_TRIED, num_buckets))
    except (torch.OutOfMemoryError, WeightPushFailed) as error:
        logger.warning("version %d is sent whole: no delta was made: %s", staged.policy_version, first_line_of(error))
        return Shipment(staged.manifest, staged)
    if all(delta is None for delta in deltas):
        return Shipment(staged.manifest, staged)
    for spec, delta in zip(manifest.buckets, deltas, strict=True):
        spec.wire_bytes = 0 if delta is None else delta.numel()
    return Shipment(manifest, staged, tuple(deltas))


def _encoded(old: torch.Tensor, new: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    """Return the delta of one bucket, if it is smaller. It is complete on the GPU too."""
    with beside_training(new):
        encoded = encode(old, new, item_bytes)
        if new.is_cuda:
            torch.cuda.current_stream().synchronize()
    return encoded


def _has_same_layout(base: weights_pb2.WeightManifest, manifest: weights_pb2.WeightManifest) -> bool:
    """Return whether both have the same tensors in the same buckets."""
    return list(base.tensors) == list(manifest.tensors)
