"""A random Qwen2 whose responses end by themselves, with lengths as varied as those of a real model."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.tiny_models import EOS_TOKEN_ID, write_tokenizer


@dataclass(frozen=True)
class ModelShape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: str = "float32"
    max_positions: int = 1024


def make_model(folder: Path, shape: ModelShape, mean_tokens: int) -> Path:
    """Write a model folder with a tokenizer. At temperature 1 a response ends with probability 1 / mean_tokens at each
    token. The first entry of every embedding is the same, so the output row of the end token can use it as a bias."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=EOS_TOKEN_ID,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        model: Any = Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        model.model.embed_tokens.weight[:, 0] = 1.0
        ids = torch.randint(2, shape.vocab_size, (4, 16))
        hidden = model.model(ids).last_hidden_state[:, -1].float()
        others = (hidden @ model.lm_head.weight.float().T).logsumexp(-1)
        row = torch.zeros(shape.hidden_size)
        row[0] = (others.mean() - math.log(mean_tokens)) / hidden[:, 0].mean()
        model.lm_head.weight[EOS_TOKEN_ID] = row.to(model.lm_head.weight.dtype)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.vocab_size)
    return folder
