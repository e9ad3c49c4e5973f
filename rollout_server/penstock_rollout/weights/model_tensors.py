"""The tensors of the model that serves: check a push against them, and merge an adapter into them.

Of a low-rank adapter only the adapter itself is sent. The engine loads the merged weights, so it decodes as fast as it
does without an adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import TIED_HEAD, tensor_shapes, weight_files
from penstock.weights.manifest import ITEM_BYTES, TensorShape


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


A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"


def merged_weights(folder: Path, adapter: dict[str, torch.Tensor], scale: float) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a push of the whole model would have.

    A weight W that the adapter names becomes W + scale * lora_B @ lora_A, computed in float32."""
    merged: list[tuple[str, torch.Tensor]] = []
    names = tensor_shapes(folder).keys() | {TIED_HEAD}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in (name for name in file.keys() if name in names):  # noqa: SIM118  (not a dict)
                weight = file.get_tensor(name)
                if name + A_SUFFIX in adapter:
                    low, up = adapter[name + A_SUFFIX], adapter[name + B_SUFFIX]
                    product = scale * (up.float() @ low.float())
                    weight = (weight.to(product.device, torch.float32) + product).to(weight.dtype)
                merged.append((name, weight))
    return merged


def check_adapter(adapter: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless each lora_A and lora_B form a pair that matches a weight of the model."""
    names = {name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in adapter}
    for name in sorted(names):
        low, up = adapter.get(name + A_SUFFIX), adapter.get(name + B_SUFFIX)
        if low is None or up is None:
            raise WeightPushFailed(f"the adapter has only one of lora_A and lora_B for {name}")
        if name not in shapes:
            raise WeightPushFailed(f"the adapter changes {name}, which the model does not have")
        if len(low) != 2 or len(up) != 2 or (up[0], low[1]) != shapes[name] or up[1] != low[0]:
            raise WeightPushFailed(f"lora_B {up} @ lora_A {low} does not match {name} of shape {shapes[name]}")
