"""Read the stop tokens and tensor shapes of a Hugging Face model folder, before an engine loads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

TIED_HEAD = "lm_head.weight"
"""The output layer. It is the embedding itself in a model with tied embeddings."""


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, read from the headers of the safetensors files. A tied head is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    if not shapes:
        raise ConfigError(f"{folder} contains no *.safetensors; save the model with save_pretrained")
    if _read_json(folder / "config.json").get("tie_word_embeddings"):
        shapes.pop(TIED_HEAD, None)
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    parsed = json.loads(path.read_text())
    return parsed if isinstance(parsed, dict) else {}
