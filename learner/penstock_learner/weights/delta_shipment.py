"""Make a shipment that contains only the changes since another version."""

from __future__ import annotations

import logging

import torch

from penstock.errors import first_line_of
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

    Buckets are encoded as soon as they are staged, where they are: on the GPU, or in host memory. Raises
    TrainingDiverged if the base was refused."""
    if base is staged or not _has_same_layout(base.manifest, staged.manifest):
        return Shipment(staged.manifest, staged)
    base.wait_sealed(deadline)
    manifest = weights_pb2.WeightManifest()
    manifest.CopyFrom(staged.manifest)
    manifest.base_version = base.policy_version
    deltas: list[torch.Tensor | None] = []
    for index, (spec, old) in enumerate(zip(manifest.buckets, base.memory.buckets, strict=True)):
        if index >= NUM_TRIED and not any(delta is not None for delta in deltas):
            break
        try:
            encoded = _encoded(old, staged.bucket(index, deadline), item_bytes(manifest))
        except torch.OutOfMemoryError as error:
            logger.warning("weights are sent whole: no GPU memory is left to make a delta: %s", first_line_of(error))
            return Shipment(staged.manifest, staged)
        deltas.append(encoded)
        spec.wire_bytes = 0 if encoded is None else encoded.numel()
    if all(encoded is None for encoded in deltas):
        return Shipment(staged.manifest, staged)
    return Shipment(manifest, staged, tuple(deltas))


def _encoded(old: torch.Tensor, new: torch.Tensor, item_bytes: int) -> torch.Tensor | None:
    with beside_training(new):
        encoded = encode(old, new, item_bytes)
        if new.is_cuda:
            torch.cuda.current_stream().synchronize()
    return encoded


def _has_same_layout(base: weights_pb2.WeightManifest, manifest: weights_pb2.WeightManifest) -> bool:
    """Return whether both have the same tensors in the same buckets."""
    return list(base.tensors) == list(manifest.tensors)
