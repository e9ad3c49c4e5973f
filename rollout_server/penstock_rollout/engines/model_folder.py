"""What an engine must know of a Hugging Face model folder before it loads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.manifest import ITEM_BYTES, TensorShape
from penstock_rollout.weights.adapter import check_adapter

TIED_HEAD = "lm_head.weight"
"""A push may hold it even where the output layer is the embedding."""


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a response: of generation_config.json, or of config.json when that names none."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the headers of the folder's safetensors files; a tied head is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    if not shapes:
        raise ConfigError(f"{folder} holds no *.safetensors; save the model with save_pretrained")
    if _read_json(folder / "config.json").get("tie_word_embeddings"):
        shapes.pop(TIED_HEAD, None)
    return shapes


def check_manifest(manifest: weights_pb2.WeightManifest, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless the push holds exactly the tensors of the model that serves.

    Asked before anything is received, since a set that does not fit would fail in the middle of its load."""
    pushed = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    _check_layout(manifest)
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
    for spec in manifest.tensors:
        shape = tuple(spec.shape)
        if spec.dtype not in ITEM_BYTES or spec.num_bytes != TensorShape(spec.name, spec.dtype, shape).num_bytes:
            raise WeightPushFailed(f"{spec.name} is not {spec.num_bytes} bytes of {spec.dtype}")
        if not 0 <= spec.bucket < len(manifest.buckets):
            raise WeightPushFailed(f"{spec.name} lies in bucket {spec.bucket}, and there are {len(manifest.buckets)}")
        if spec.offset_bytes < 0 or spec.offset_bytes + spec.num_bytes > manifest.buckets[spec.bucket].num_bytes:
            raise WeightPushFailed(f"{spec.name} does not lie inside its bucket")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    parsed = json.loads(path.read_text())
    return parsed if isinstance(parsed, dict) else {}
