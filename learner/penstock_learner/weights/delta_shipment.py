"""Make a shipment that contains only the changes since another version."""

from __future__ import annotations

import torch

from penstock.v1 import weights_pb2
from penstock.weights import delta
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import item_bytes
from penstock_learner.weights.senders.sender import Shipment
from penstock_learner.weights.staging import StagedVersion


def delta_shipment(staged: StagedVersion, base: StagedVersion, deadline: Deadline) -> Shipment:
    """Send each bucket as a delta on `base`, or whole if the delta is not smaller."""
    if base is staged or not _has_same_layout(base.manifest, staged.manifest):
        return Shipment(staged.manifest, staged)
    staged.checksums(deadline)
    base.checksums(deadline)
    manifest = weights_pb2.WeightManifest()
    manifest.CopyFrom(staged.manifest)
    manifest.base_version = base.policy_version
    deltas: list[torch.Tensor | None] = []
    for spec, old, new in zip(manifest.buckets, base.memory.buckets, staged.memory.buckets, strict=True):
        encoded = delta.encode(old.cpu().numpy(), new.cpu().numpy(), item_bytes(manifest))
        deltas.append(None if encoded is None else torch.from_numpy(encoded))
        spec.wire_bytes = 0 if encoded is None else len(encoded)
    if all(encoded is None for encoded in deltas):
        return Shipment(staged.manifest, staged)
    return Shipment(manifest, staged, tuple(deltas))


def _has_same_layout(base: weights_pb2.WeightManifest, manifest: weights_pb2.WeightManifest) -> bool:
    """Return whether both have the same tensors in the same buckets."""
    return list(base.tensors) == list(manifest.tensors)
