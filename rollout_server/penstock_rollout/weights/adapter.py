"""Merge a low-rank adapter into the weights of the model folder.

Only the adapter is sent. The engine loads the merged weights, so it decodes as fast as it does without an adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from penstock.errors import WeightPushFailed
from penstock.weights.folder_tensors import TIED_HEAD, tensor_shapes, weight_files

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
