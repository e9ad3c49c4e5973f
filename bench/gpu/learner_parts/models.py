"""Shapes of the models that the learner's benchmark trains, with random weights, and their FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from harness import sized


class Setting(NamedTuple):
    """A trade-off between time and memory."""

    recomputed: float
    """Share of the layers that are recomputed."""
    tokens: int
    """Tokens of a micro-batch."""
    kept: float = 1.0
    """Share of a compiled layer's activations that are kept."""

    def __str__(self) -> str:
        return f"{self.recomputed:.0%} recomputed, {self.tokens} tokens, {self.kept:.0%} kept"


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2.5 model, and of the batches it is measured on."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool
    rows: int
    """Sequences in a padded batch of the baseline."""
    length: int = 4096
    shortest: int = 256
    settings: tuple[Setting, ...] = ()
    """Settings to measure for our step."""
    mfu_goal: float = 0.0
    mixed_goal: float = 0.0
    """Goal on mixed lengths, as a multiple of the padded baseline. 0 if its batches have too few rows for much
    padding."""

    @property
    def matmul_weights(self) -> int:
        """Number of weights that every token is multiplied with. Looking up an embedding is not a multiplication."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def flops_per_token(self, length: float) -> float:
        """FLOPs of the forward and backward pass of a token in a sequence of `length`. Causal attention computes half
        of the square."""
        return 6 * self.matmul_weights + 6 * self.layers * self.heads * self.head_dim * length

    def config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
            rope_theta=1_000_000.0,
        )

    def uniform(self) -> list[int]:
        return [self.length] * self.rows

    def mixed(self) -> list[int]:
        """Sequences for four padded batches."""
        random = np.random.default_rng(7)
        return [int(n) for n in random.integers(self.shortest, self.length + 1, 4 * self.rows)]


SHAPES = {
    "tiny": Shape(
        64,
        128,
        2,
        2,
        1,
        512,
        True,
        2,
        *sized((64, 8), (4, 2)),
        sized((Setting(0.0, 128), Setting(0.5, 64)), (Setting(0.5, 64),)),
    ),  # fmt: skip
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True, 8, settings=(Setting(0.0, 16384),), mfu_goal=0.45, mixed_goal=2),
    "1.5b": Shape(
        1536, 8960, 28, 12, 2, 151936, True, 4, settings=(Setting(0.25, 8192, 0.7),), mfu_goal=0.55, mixed_goal=2
    ),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False, 2, settings=(Setting(0.5, 8192, 0.7),), mfu_goal=0.60),
}
