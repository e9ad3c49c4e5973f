"""Shapes of decoder-only models, from which memory and time are computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    has_tied_head: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention and a gated feed-forward network. Norms and biases are left out, because
        they are small."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def root_parameters(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocabulary_size * self.hidden_size * (1 if self.has_tied_head else 2)

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.root_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in 16 bits, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * 2


KNOWN = {
    shape.name: shape
    for shape in (
        ModelShape("0.5b", 24, 896, 4864, 14, 2, 64, 151936, True),
        ModelShape("1.5b", 28, 1536, 8960, 12, 2, 128, 151936, True),
        ModelShape("3b", 36, 2048, 11008, 16, 2, 128, 151936, True),
        ModelShape("7b", 28, 3584, 18944, 28, 4, 128, 152064, False),
        ModelShape("14b", 48, 5120, 13824, 40, 8, 128, 152064, False),
        ModelShape("32b", 64, 5120, 27648, 40, 8, 128, 152064, False),
        ModelShape("70b", 80, 8192, 28672, 64, 8, 128, 128256, False),
    )
}
"""The shapes of Qwen2.5, and of Llama 3 70B."""


def find_shape(name: str) -> ModelShape:
    """Return a known shape, or the shape that the config.json of a model folder describes."""
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {name} is neither one of {', '.join(KNOWN)} nor a folder with config.json")
    try:
        config = json.loads(path.read_text())
        num_heads = int(config["num_attention_heads"])
        return ModelShape(
            name=Path(name).name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            vocabulary_size=int(config["vocab_size"]),
            has_tied_head=bool(config.get("tie_word_embeddings", False)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a dense decoder: {error!r}") from error
