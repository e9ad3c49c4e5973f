"""Tiny mixtures of experts in the sizes that vLLM's kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_architectures import tiny_model
from tests.tiny_model import EOS_TOKEN_ID, write_tokenizer

VOCAB_SIZE = 96
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "eos_token_id": EOS_TOKEN_ID, "bos_token_id": 0, "sliding_window": None,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "head_dim": None, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
}  # fmt: skip
"""The sizes of DeepSeek's latent attention that GPU kernels are built for."""
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {"moe_intermediate_size": None},
    "gpt_oss": {"head_dim": 64, "moe_intermediate_size": None, "sliding_window": 128},
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | {"scoring_func": "sigmoid"},
}


def write_tiny_experts(name: str, folder: Path, dtype: str = "float32", seed: int = 0) -> None:
    """Write a random mixture of experts with a tokenizer of one word per token."""
    import torch

    model = tiny_model(name, seed, **(_SIZES | SETTINGS[name]))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
