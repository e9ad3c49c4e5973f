"""A Hugging Face causal model as the learner uses it: packed tokens in, log-probs and entropies of the response out.

The [tokens, vocabulary] logits are never whole in memory (`log_prob_head.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_learner.model import attention
from penstock_learner.model.backbone import ModelInputs, hidden_states
from penstock_learner.model.log_prob_head import log_probs_and_entropy
from penstock_learner.model.sequence_parallel import SequenceParallel


class PackedCausalLM(nn.Module):
    """Wraps the model so that the sharded root covers embedding, layers and head in one forward pass.

    The head works on `chunk_tokens` tokens at a time. `compiled` fuses its element-wise operations."""

    def __init__(self, lm: nn.Module, chunk_tokens: int, *, compiled: bool = False) -> None:
        super().__init__()
        self.lm: Any = lm
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled
        self.has_adapter = False

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Log-prob [T], with gradient, and entropy [T], without, of every response token."""
        if inputs.packing.parallel is not None:
            return self._forward_slice(inputs, inputs.packing.parallel)
        hidden = hidden_states(self.lm, inputs.token_ids, inputs.packing.columns, inputs.packing)
        return self._head(hidden[inputs.predicting], inputs.targets, inputs.temperatures)

    def _forward_slice(self, inputs: ModelInputs, parallel: SequenceParallel) -> tuple[Tensor, Tensor]:
        """Compute this rank's slice of the tokens. Every rank gets the results of all tokens."""
        num_tokens = len(inputs.token_ids)
        own = parallel.own(num_tokens)
        mine = ((inputs.predicting >= own.start) & (inputs.predicting < own.stop)).nonzero().squeeze(1)
        tokens, positions = (
            parallel.pad(values[own], num_tokens) for values in (inputs.token_ids, inputs.packing.columns)
        )
        hidden = hidden_states(self.lm, tokens, positions, inputs.packing)
        results = self._head(
            hidden[inputs.predicting[mine] - own.start], inputs.targets[mine], inputs.temperatures[mine]
        )
        log_probs, entropy = (parallel.whole(result, mine, len(inputs.targets)) for result in results)
        return log_probs, entropy

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(
            hidden,
            self.lm.lm_head.weight,
            targets,
            temperatures,
            chunk_tokens=self.chunk_tokens,
            compiled=self.compiled,
        )


def load_model(path: Path, dtype: torch.dtype, chunk_tokens: int, *, compiled: bool = False) -> PackedCausalLM:
    """Load a Hugging Face folder with packed attention. Never reaches the network."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path {path} is not a model folder (no config.json); give a Hugging Face checkpoint")
    from transformers import AutoModelForCausalLM

    attention.register()
    lm = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    if getattr(lm.lm_head, "bias", None) is not None:
        raise ConfigError(
            f"model.path {path} has a bias in its head, which the learner cannot train; use another model"
        )
    return PackedCausalLM(lm, chunk_tokens, compiled=compiled)
