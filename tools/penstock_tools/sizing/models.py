"""Shapes of decoder-only models, from which memory and time are computed.

The weights of a model folder are counted in the headers of its safetensors files. Where there are none, and for the
shapes in `KNOWN`, they are computed from the sizes. Norms and biases are then ignored, because they are small.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hub import is_hub_id, local_model
from penstock.weights.folder_tensors import language_fields, tensor_shapes, weight_files


@dataclass(frozen=True)
class Experts:
    num_experts: int
    """Experts of one layer, of which the router chooses `per_token` for each token."""
    per_token: int
    size: int
    shared_size: int = 0
    """Intermediate size of the experts that every token uses, together."""
    num_dense_layers: int = 0
    """Layers that have a plain feed-forward network instead of experts."""


@dataclass(frozen=True)
class Counted:
    largest_layer: int
    """In a mixture of experts, a layer with all its experts."""
    root: int
    """Weights that belong to no layer: the embedding, the head and the last norm."""
    total: int
    experts: int
    """Weights of all experts that a router chooses from."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its memory and its speed depend on."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    has_tied_head: bool
    experts: Experts | None = None
    counted: Counted | None = None
    kv_size: int = 0
    """Numbers that the KV cache holds for each token and layer. 0 for a key and a value of each key head."""

    @functools.cached_property
    def weights(self) -> Counted:
        """Numbers of weights: counted, or computed from the sizes."""
        if self.counted is not None:
            return self.counted
        attention, dense = self.hidden_size * self.attention_size, 3 * self.hidden_size * self.intermediate_size
        root = self.embedding_parameters * (1 if self.has_tied_head else 2)
        if self.experts is None:
            return Counted(attention + dense, root, self.num_layers * (attention + dense) + root, 0)
        experts = self.experts
        routed = 3 * self.hidden_size * experts.num_experts * experts.size
        mixture = routed + self.hidden_size * (3 * experts.shared_size + experts.num_experts)  # with the router
        num_mixtures = self.num_layers - experts.num_dense_layers
        layers = self.num_layers * attention + experts.num_dense_layers * dense + num_mixtures * mixture
        return Counted(attention + max(mixture, dense), root, layers + root, num_mixtures * routed)

    @property
    def experts_of_layer(self) -> float:
        """Weights of the experts of one layer that a router chooses from."""
        return self.weights.experts / (self.num_layers - self.experts.num_dense_layers) if self.experts else 0.0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding. The head has as many."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.weights.total

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: all of them, or in a mixture of experts, fewer."""
        return round(self.read_parameters(1))

    @property
    def active_intermediate_size(self) -> int:
        """Width of the feed-forward networks that one token passes through in a layer."""
        if self.experts is None:
            return self.intermediate_size
        routed = self.experts.per_token * self.experts.size + self.experts.shared_size
        return max(routed, self.intermediate_size if self.experts.num_dense_layers else 0)

    @property
    def attention_size(self) -> int:
        """Numbers per token of queries, keys, values and the attention's output."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_size

    def shared_attention_size(self, num_sharing: int) -> int:
        """The same if this many ranks share a sequence: key heads that cannot be divided are copied."""
        num_copied = math.lcm(self.num_kv_heads, num_sharing) - self.num_kv_heads
        return self.attention_size + 2 * num_copied * self.head_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in 16 bits, over all layers."""
        return 2 * self.num_layers * (self.kv_size or 2 * self.num_kv_heads * self.head_size)

    def read_parameters(self, num_tokens: float) -> float:
        """Parameters that an engine reads to decode this many tokens at once: tokens choose different experts."""
        if self.experts is None:
            return self.num_parameters
        missed: float = (1 - self.experts.per_token / self.experts.num_experts) ** num_tokens
        return self.num_parameters - missed * self.weights.experts

    def without_head(self) -> ModelShape:
        """The same model with one number as its output, as critics and reward models are."""
        if self.has_tied_head:
            return self
        weights, head = self.weights, self.embedding_parameters
        counted = replace(weights, root=weights.root - head, total=weights.total - head)
        return replace(self, has_tied_head=True, counted=counted)


KNOWN = {
    shape.name: shape
    for shape in (
        ModelShape("135m", 30, 576, 1536, 9, 3, 64, 49152, True),
        ModelShape("0.5b", 24, 896, 4864, 14, 2, 64, 151936, True),
        ModelShape("1.5b", 28, 1536, 8960, 12, 2, 128, 151936, True),
        ModelShape("3b", 36, 2048, 11008, 16, 2, 128, 151936, True),
        ModelShape("7b", 28, 3584, 18944, 28, 4, 128, 152064, False),
        ModelShape("14b", 48, 5120, 13824, 40, 8, 128, 152064, False),
        ModelShape("30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, False, Experts(128, 8, 768)),
        ModelShape("32b", 64, 5120, 27648, 40, 8, 128, 152064, False),
        ModelShape("70b", 80, 8192, 28672, 64, 8, 128, 128256, False),
    )
}
"""The shapes of SmolLM2 135M, of Qwen2.5, of Qwen3 30B-A3B, and of Llama 3 70B."""

_QWEN = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
HUB_IDS = {name: f"Qwen/Qwen2.5-{name.upper()}-Instruct" for name in _QWEN} | {
    "135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "30b-a3b": "Qwen/Qwen3-30B-A3B",
    "70b": "meta-llama/Llama-3.3-70B-Instruct",
}
_QWEN_ID = re.compile(r"Qwen/Qwen2\.5-(?:Math-|Coder-)?(?P<size>[\d.]+B)(?:-Instruct)?(?:@[\w.-]+)?")


def shape_of_hub_id(name: str) -> ModelShape | None:
    """The shape of a model of the Hub, if it is one of `KNOWN`."""
    found = _QWEN_ID.fullmatch(name)
    size = found["size"].lower() if found else next((key for key, value in HUB_IDS.items() if value == name), "")
    return KNOWN.get(size)


# ── models in folders ──

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def find_shape(name: str) -> ModelShape:
    """Return a known shape, or the shape of the model in a folder. For a Hub id only config.json is fetched, unless its
    shape is known."""
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    folder = Path(name)
    if is_hub_id(folder):
        if (known := shape_of_hub_id(name)) is not None:
            return known
        folder = local_model(folder, "model.path", ("config.json",))
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {name} is neither one of {', '.join(KNOWN)} nor a folder with config.json")
    try:
        config = language_fields(json.loads(path.read_text()))
        return replace(_shape(config, folder), name=Path(name).name)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} does not describe a decoder that can be planned: {error!r}") from error


def _shape(config: dict[str, Any], folder: Path) -> ModelShape:
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    experts = _experts(config)
    is_same_size = experts is not None and config.get("moe_intermediate_size") is None
    latent = int(config.get("kv_lora_rank") or 0)
    return ModelShape(
        name=folder.name,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=experts.size if experts and is_same_size else int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or config.get("v_head_dim") or hidden_size // num_heads),
        vocabulary_size=int(config["vocab_size"]),
        has_tied_head=bool(config.get("tie_word_embeddings", False)),
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
        experts += num_weights if ".experts." in name else 0
    if not layers:
        return None
    return Counted(max(layers.values()), root, root + layers.total(), experts)
