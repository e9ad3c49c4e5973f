"""What a Hugging Face model folder says without loading it: names and shapes of its tensors, and its stop tokens.

A push has exactly these tensors, so an engine can load it as it has loaded the folder. Skipped are tensors that no
forward pass of the model uses: tensors that predict several tokens ahead, which are layers beyond `num_hidden_layers`
(GLM-4.5, DeepSeek-V3) or are named `mtp` (Qwen3-Next, MiMo-V2), and in old folders the tables of rotary embeddings and
the causal masks of attention (GPT-2, GPT-NeoX). Of a composite model, which also sees or hears, a push has the language
model alone: the tensors under the prefix of its word embedding, and its head.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

TIED_HEAD = "lm_head.weight"
"""The output layer. It is the embedding itself in a model with tied embeddings. Composite models may prefix it."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PREDICTS_AHEAD = re.compile(r"(?:^|\.)mtp")
_MASK = re.compile(r"\.(?:attn|attention)\.bias$")
_MASK_DIMENSIONS = 4
"""A causal mask is [1, 1, tokens, tokens]. A learned bias of the same name is a vector."""
_WORDS = re.compile(r"(.*\.)(?:embed_tokens|embeddings)\.weight")
"""The word embedding of a composite model's language model, after its prefix."""
_OTHER_PART = re.compile(r"vision|visual|audio|image|project|resampl")
"""A part of the names of other parts which some models have under the same prefix."""
_NESTED = ("text_config", "vision_config", "audio_config")
_UNUSED_TABLES = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attention.masked_bias")


def safetensors_of(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads. Others, such as `consolidated.safetensors`, are not read.

    Empty if the weights have another format. Raises ConfigError if the index names a file that is not there."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    named = read_json(folder / INDEX).get("weight_map", {})
    files = [folder / name for name in sorted(set(named.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder} lacks {missing[0]}, which its {INDEX} names; download the model again")
    return files


def weight_files(folder: Path) -> list[Path]:
    """The files of `safetensors_of`. In a folder without an index they are all safetensors files, as for an engine."""
    return safetensors_of(folder) or sorted(folder.glob("*.safetensors"))


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a push contains, read from the headers of the safetensors files.

    A tied head is skipped. Raises ConfigError for a folder without safetensors files."""
    shapes = _all_shapes(folder)
    if not shapes:
        raise ConfigError(f"{folder} contains no *.safetensors; save the model with save_pretrained")
    config = read_json(folder / "config.json")
    text, is_own = language_fields(config), _owns(folder, shapes)
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    num_layers = text.get("num_hidden_layers")
    return {
        name: shape
        for name, shape in shapes.items()
        if is_own(name) and _is_used(name, shape, num_layers) and not (is_tied and is_head(name))
    }


def other_parts(folder: Path) -> list[str]:
    """Names of the tensors of a composite model that do not belong to its language model."""
    shapes = _all_shapes(folder)
    is_own = _owns(folder, shapes)
    return [name for name in shapes if not is_own(name)]


def language_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the language model."""
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def is_head(name: str) -> bool:
    return name == TIED_HEAD or name.endswith(f".{TIED_HEAD}")


def has_other_parts(folder: Path) -> bool:
    """Whether the folder's model sees or hears besides."""
    config = read_json(folder / "config.json")
    return any(isinstance(config.get(part), dict) for part in _NESTED)


def _owns(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], bool]:
    """Tells whether a tensor belongs to the language model, by its name."""
    prefixes = [found[1] for name in shapes if (found := _WORDS.fullmatch(name))]
    if not prefixes or not has_other_parts(folder):
        return lambda name: True
    prefix = min(prefixes, key=len)

    def is_own(name: str) -> bool:
        part = name.removeprefix(prefix).partition(".")[0]
        return is_head(name) or (name.startswith(prefix) and _OTHER_PART.search(part) is None)

    return is_own


def _all_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes


def _is_used(name: str, shape: tuple[int, ...], num_layers: Any) -> bool:
    layer = _LAYER.search(name)
    is_beyond = layer is not None and isinstance(num_layers, int) and int(layer.group(1)) >= num_layers
    is_mask = _MASK.search(name) is not None and len(shape) == _MASK_DIMENSIONS
    return not (is_beyond or is_mask or _PREDICTS_AHEAD.search(name) or name.endswith(_UNUSED_TABLES))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    if not path.exists():
        return {}
    parsed = json.loads(path.read_text())
    return parsed if isinstance(parsed, dict) else {}


def vocabulary_size(folder: Path) -> int | None:
    """The number of tokens that the model has, or None if neither config.json nor its word embedding says so. Composite
    models may omit it in config.json."""
    size: int | None = language_fields(read_json(folder / "config.json")).get("vocab_size")
    if size is None:
        rows = {name: shape[0] for name, shape in _all_shapes(folder).items() if _WORDS.fullmatch(name)}
        size = rows[min(rows, key=len)] if rows else None
    return size


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response: those of generation_config.json, else those of config.json."""
    config = read_json(folder / "config.json")
    for fields in (read_json(folder / "generation_config.json"), config, language_fields(config)):
        eos = fields.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()
