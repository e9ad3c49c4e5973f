"""A low-rank adapter, merged into the weights of the model folder: only the adapter travels, and the engine decodes at
the speed of a plain model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from penstock.errors import WeightPushFailed

A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"


def merged_weights(folder: Path, adapter: dict[str, torch.Tensor], scale: float) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of the folder; W + scale * lora_B @ lora_A where the adapter names W. Products are in float32."""
    merged: list[tuple[str, torch.Tensor]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                weight = file.get_tensor(name)
                if name + A_SUFFIX in adapter:
                    low, up = adapter[name + A_SUFFIX], adapter[name + B_SUFFIX]
                    product = scale * (up.float() @ low.float())
                    weight = (weight.to(product.device, torch.float32) + product).to(weight.dtype)
                merged.append((name, weight))
    if not merged:
        raise WeightPushFailed(f"{folder} holds no *.safetensors to add the adapter to")
    return merged


def check_adapter(adapter: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless every pair of the adapter fits a weight of the model."""
    names = {name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in adapter}
    for name in sorted(names):
        low, up = adapter.get(name + A_SUFFIX), adapter.get(name + B_SUFFIX)
        if low is None or up is None:
            raise WeightPushFailed(f"the adapter has only one half for {name}")
        if name not in shapes:
            raise WeightPushFailed(f"the adapter changes {name}, which the model lacks")
        if len(low) != 2 or len(up) != 2 or (up[0], low[1]) != shapes[name] or up[1] != low[0]:
            raise WeightPushFailed(f"the adapter's {up} @ {low} does not fit {name} of shape {shapes[name]}")
