"""A version as what changed since another, where that is smaller."""

from __future__ import annotations

import torch

from penstock.v1 import weights_pb2
from penstock.weights import delta
from penstock.weights.manifest import item_bytes
from penstock.weights.patience import Patience
from penstock_learner.weights.senders.sender import Shipment
from penstock_learner.weights.staging import StagedVersion


def delta_shipment(staged: StagedVersion, base: StagedVersion, patience: Patience) -> Shipment:
    """Bucket by bucket a delta on `base`, or the whole bucket where that is no larger."""
    if base is staged or not _fits(base.manifest, staged.manifest):
        return Shipment(staged.manifest, staged)
    staged.checksums(patience)
    base.checksums(patience)
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


def _fits(base: weights_pb2.WeightManifest, manifest: weights_pb2.WeightManifest) -> bool:
    """The same layout: the same tensors in the same buckets."""
    return list(base.tensors) == list(manifest.tensors)
