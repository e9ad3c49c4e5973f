"""Names and shapes of the tensors in a Hugging Face model folder. Both sides of a weight push use them.

A push has exactly these tensors, so an engine can load it as it has loaded the folder. Left out are tensors that no
forward pass of the model uses: layers beyond `num_hidden_layers`, which predict several tokens ahead (GLM-4.5,
DeepSeek-V3), and the tables of rotary embeddings in old folders.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

TIED_HEAD = "lm_head.weight"
"""The output layer. It is the embedding itself in a model with tied embeddings."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a push contains, read from the headers of the safetensors files.

    A tied head is left out. Raises ConfigError for a folder without safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    if not shapes:
        raise ConfigError(f"{folder} contains no *.safetensors; save the model with save_pretrained")
    config = read_json(folder / "config.json")
    if config.get("tie_word_embeddings"):
        shapes.pop(TIED_HEAD, None)
    num_layers = config.get("num_hidden_layers")
    return {name: shape for name, shape in shapes.items() if _is_used(name, num_layers)}


def _is_used(name: str, num_layers: Any) -> bool:
    layer = _LAYER.search(name)
    is_beyond = layer is not None and isinstance(num_layers, int) and int(layer.group(1)) >= num_layers
    return not is_beyond and not name.endswith("rotary_emb.inv_freq")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    if not path.exists():
        return {}
    parsed = json.loads(path.read_text())
    return parsed if isinstance(parsed, dict) else {}
