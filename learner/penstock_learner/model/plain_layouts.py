"""The tensors of plain dense decoders, from config.json alone.

`--check` builds a model without weights to see whether its folder fits, which takes seconds, most of them to import
transformers. The most common architectures need no model: their tensors follow from a few numbers. A folder that has
exactly these tensors, and no setting that is not listed here, would be accepted as a model too; tests compare the two.
Every other model is not plain, and is built. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.weights.folder_tensors import TIED_HEAD, read_json, tensor_shapes

PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type`. All are on the packed path (`architectures.PACKED_TYPES`)."""
Shapes = dict[str, tuple[int, ...]]


def is_plain(folder: Path) -> bool:
    """Whether the learner can train the folder's model, and engines can load what it pushes. False if that is not known
    without building the model."""
    try:
        config = read_json(folder / "config.json")
        wanted = tensor_shapes(folder)
    except (ConfigError, ValueError, OSError):
        return False
    return _has_known_settings(config) and plain_shapes(config) == wanted


def plain_shapes(config: dict[str, Any]) -> Shapes:
    """The tensors of a folder with this config.json, without a tied head. Its settings must be known."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings", False):
        shapes[TIED_HEAD] = (vocabulary, width)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config)}
    return shapes


def _layer(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, width, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // heads
    has_bias = config.get("attention_bias", False) and kind in ("llama", "qwen3")
    outputs = {"q": heads * size, "k": pairs * size, "v": pairs * size}
    for name, length in outputs.items():
        yield f"self_attn.{name}_proj.weight", (length, width)
        if has_bias or kind == "qwen2":
            yield f"self_attn.{name}_proj.bias", (length,)
    yield "self_attn.o_proj.weight", (width, heads * size)
    if has_bias:
        yield "self_attn.o_proj.bias", (width,)
    if kind == "qwen3":
        yield from ((f"self_attn.{name}_norm.weight", (size,)) for name in ("q", "k"))
    for name, shape in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
        yield f"mlp.{name}_proj.weight", shape
        if kind == "llama" and config.get("mlp_bias", False):
            yield f"mlp.{name}_proj.bias", shape[:1]
    yield from ((f"{name}_layernorm.weight", (width,)) for name in ("input", "post_attention"))


def _has_known_settings(config: dict[str, Any]) -> bool:
    """Whether transformers reads every setting as the functions above do. A setting that is not listed may change the
    model."""
    needed = {"model_type", *(["head_dim"] if config.get("model_type") == "qwen3" else [])}
    if not (_SIZES | needed).issubset(config):
        return False
    if not all(name in _SETTINGS and _SETTINGS[name](value) for name, value in config.items()):
        return False
    heads, layers = config["num_attention_heads"], config.get("layer_types")
    is_divided = config["hidden_size"] % heads == 0 and heads % config["num_key_value_heads"] == 0
    return is_divided and (layers is None or len(layers) == config["num_hidden_layers"])


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _or_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


def _is_token(value: Any) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return all(type(token) is int and token >= 0 for token in tokens)


def _is_layer_list(value: Any) -> bool:
    return isinstance(value, list) and set(value) <= {"full_attention", "sliding_attention"}


def _is_rotation(value: Any) -> bool:
    """Rotary embeddings that do not depend on the length of a sequence."""
    if not isinstance(value, dict) or value.get("rope_type") not in ("default", "llama3"):
        return False
    numbers = {name: number for name, number in value.items() if name != "rope_type"}
    return numbers.keys() <= _ROTATION_NUMBERS and all(map(_is_number, numbers.values()))


_ROTATION_NUMBERS = {
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
}  # fmt: skip
_SIZES = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
}  # fmt: skip
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SIZES, _is_size),
    "model_type": PLAIN_TYPES.__contains__,
    "architectures": lambda value: isinstance(value, list),
    "hidden_act": lambda value: value == "silu",
    "head_dim": _is_size,
    "max_position_embeddings": _is_size,
    "max_window_layers": _is_number,
    "layer_types": _is_layer_list,
    "sliding_window": _or_none(_is_size),
    "rope_parameters": _is_rotation,
    "rope_scaling": _or_none(_is_rotation),
    "dtype": lambda value: value in ("float32", "bfloat16", "float16"),
    "torch_dtype": lambda value: value in ("float32", "bfloat16", "float16"),
    "transformers_version": lambda value: isinstance(value, str),
    "pretraining_tp": lambda value: value == 1,
    **dict.fromkeys(("attention_dropout", "initializer_range", "rms_norm_eps", "rope_theta"), _is_number),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _or_none(_is_token)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache", "use_sliding_window"), _is_flag),
}
