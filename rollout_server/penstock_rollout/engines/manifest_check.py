"""Check a push's manifest against the model that serves, before anything is received."""

from __future__ import annotations

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import TIED_HEAD
from penstock.weights.manifest import ITEM_BYTES, TensorShape
from penstock_rollout.weights.adapter import check_adapter


def check_manifest(manifest: weights_pb2.WeightManifest, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless the push has exactly the tensors of the model, whose shapes are given.

    Without this check a push that does not match would fail in the middle of its load. A push may contain a tied head,
    although `shapes` does not."""
    _check_layout(manifest)
    pushed = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    if manifest.HasField("adapter"):
        check_adapter(pushed, shapes)
        return
    if missing := sorted(shapes.keys() - pushed.keys()):
        raise WeightPushFailed(f"the push lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    if unknown := sorted(pushed.keys() - shapes.keys() - {TIED_HEAD}):
        raise WeightPushFailed(f"the push has {len(unknown)} tensors the model lacks, the first is {unknown[0]}")
    for name, shape in pushed.items():
        if shapes.get(name, shape) != shape:
            raise WeightPushFailed(f"{name} has shape {shape} in the push and {shapes[name]} in the model")


def _check_layout(manifest: weights_pb2.WeightManifest) -> None:
    """Raise WeightPushFailed unless each tensor has the size of its shape and lies inside its bucket."""
    for spec in manifest.tensors:
        shape = tuple(spec.shape)
        if spec.dtype not in ITEM_BYTES or spec.num_bytes != TensorShape(spec.name, spec.dtype, shape).num_bytes:
            raise WeightPushFailed(f"{spec.name} is not {spec.num_bytes} bytes of {spec.dtype}")
        if not 0 <= spec.bucket < len(manifest.buckets):
            raise WeightPushFailed(f"{spec.name} is in bucket {spec.bucket}, but there are {len(manifest.buckets)}")
        if spec.offset_bytes < 0 or spec.offset_bytes + spec.num_bytes > manifest.buckets[spec.bucket].num_bytes:
            raise WeightPushFailed(f"{spec.name} does not lie inside its bucket")
