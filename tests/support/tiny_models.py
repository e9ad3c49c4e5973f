"""A random Qwen2 that loads quickly. All engine tests use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock_learner.model.scalar_model import ScalarModel

VOCAB_SIZE = 64
EOS_TOKEN_ID = 1


def make_tiny_qwen2(folder: Path, seed: int) -> Path:
    """Write a model folder with a tokenizer of one word per token, and return it. Weights are scaled up so that the
    distributions are far from uniform and differ between seeds. head_dim 32 is the smallest that vLLM's CPU attention
    accepts."""
    from transformers import Qwen2ForCausalLM

    return _write(folder, seed, Qwen2ForCausalLM)


def make_tiny_classifier(folder: Path, seed: int, num_labels: int = 1) -> Path:
    """Write the same model as a reward model, with a sequence head instead of a token head."""
    from transformers import Qwen2ForSequenceClassification

    return _write(folder, seed, Qwen2ForSequenceClassification, num_labels=num_labels)


def load_scalar_model(folder: Path, dtype: torch.dtype, *, key: str, make_head: bool) -> ScalarModel:
    """Open a model with one number as output, and read its weights into host memory."""
    import torch

    from penstock_learner.model.loading import read_weights
    from penstock_learner.model.scalar_model import open_scalar_model

    model = open_scalar_model(folder, dtype, key=key, make_head=make_head)
    read_weights(model, torch.device("cpu"))
    return model


def _write(folder: Path, seed: int, kind: Any, **settings: Any) -> Path:
    import torch
    from transformers import Qwen2Config

    config = Qwen2Config(
        **settings,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = kind(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
    if model.can_generate():
        model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder


def write_qwen2(folder: Path, seed: int = 5) -> None:
    """Write a random Qwen2 beside the tokenizer of a folder, whose config.json has the size of the vocabulary and whose
    generation_config.json has the stop tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    stop_ids = (folder / "generation_config.json").read_text()
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=EOS_TOKEN_ID,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(stop_ids)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer with one word per token: `w2`, `w3` and so on."""
    words = {"<bos>": 0, "<eos>": EOS_TOKEN_ID} | {f"w{index}": index for index in range(2, vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
