"""Reads the shape of a model from its folder: sizes from config.json, numbers of weights from the safetensors files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hub import is_hub_id, local_model_config
from penstock.weights.folder_tensors import tensor_shapes, weight_files
from penstock_tools.sizing.models import KNOWN, Counted, Experts, ModelShape, shape_of_hub_id

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.")


def find_shape(name: str) -> ModelShape:
    """Return a known shape, or the shape of the model in a folder. Of a Hub id only config.json is fetched, unless its
    shape is known."""
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    folder = Path(name)
    if is_hub_id(folder):
        if (known := shape_of_hub_id(name)) is not None:
            return known
        folder = local_model_config(folder, "model.path")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {name} is neither one of {', '.join(KNOWN)} nor a folder with config.json")
    try:
        config = json.loads(path.read_text())
        return replace(_shape(config, folder), name=Path(name).name)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} does not describe a decoder that can be planned: {error!r}") from error


def _shape(config: dict[str, Any], folder: Path) -> ModelShape:
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    has_tied_head = bool(config.get("tie_word_embeddings", False))
    experts = _experts(config)
    if experts is not None and config.get("moe_intermediate_size") is None:
        intermediate_size = experts.size
    else:
        intermediate_size = int(config["intermediate_size"])
    latent = int(config.get("kv_lora_rank") or 0)
    return ModelShape(
        name=folder.name,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or config.get("v_head_dim") or hidden_size // num_heads),
        vocabulary_size=int(config["vocab_size"]),
        has_tied_head=has_tied_head,
        experts=experts,
        counted=_counted(folder),
        kv_size=latent and latent + int(config["qk_rope_head_dim"]),
    )


def _experts(config: dict[str, Any]) -> Experts | None:
    """The experts that config.json describes. Families have different names for the same sizes."""
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not num_experts:
        return None
    size = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * size
    num_dense = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    per_token = _first(config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k")
    return Experts(num_experts, per_token, size, int(shared), num_dense)


def _first(config: dict[str, Any], *names: str) -> int:
    """The first of these numbers that config.json has. Lists hold a number for each layer, of which the largest counts;
    0 if it has none."""
    found = next((config[name] for name in names if config.get(name) is not None), 0)
    return max(found) if isinstance(found, list) else int(found)


def _counted(folder: Path) -> Counted | None:
    """Count the weights that the learner loads, from the headers of the safetensors files. None without such files."""
    if not weight_files(folder):
        return None
    layers: Counter[str] = Counter()
    root = experts = 0
    for name, shape in tensor_shapes(folder).items():
        num_weights = math.prod(shape)
        layer = _LAYER.search(f".{name}")
        if layer is None:
            root += num_weights
        else:
            layers[layer[1]] += num_weights
        experts += num_weights if _EXPERT.search(name) else 0
    if not layers:
        return None
    return Counted(max(layers.values()), root, root + layers.total(), experts)
