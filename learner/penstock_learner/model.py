"""A Hugging Face causal model as the learner sees it: packed tokens in, log-probs and entropies of the response out.

The [tokens, vocabulary] logits are never whole in memory: they are made, used and dropped chunk by chunk, forward and
backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from penstock.config.learner import LoraConfig
from penstock.errors import ConfigError
from penstock_learner import attention
from penstock_learner.attention import Packing
from penstock_learner.packing import SequenceBatch

if TYPE_CHECKING:
    from penstock_learner.scalar_model import PackedScalarModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names that `model.dtype` takes."""
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft names an adapter's two halves."""


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch on the device."""

    token_ids: Tensor
    """[N]"""
    packing: Packing
    predicting: Tensor
    """[T] the token whose hidden state predicts each response token: the one before it."""
    targets: Tensor
    """[T] the response tokens."""
    temperatures: Tensor
    """[T]"""

    @classmethod
    def of(cls, batch: SequenceBatch, device: torch.device) -> ModelInputs:
        token_ids = torch.as_tensor(batch.token_ids, device=device)
        index = torch.as_tensor(batch.response_index, device=device)
        temperatures = torch.as_tensor(batch.temperatures, device=device)
        sequence_ids = torch.as_tensor(batch.sequence_ids, device=device)
        packing = Packing.of(torch.as_tensor(batch.lengths, device=device))
        return cls(token_ids, packing, index - 1, token_ids[index], temperatures[sequence_ids])


class PackedCausalLM(nn.Module):
    """Wraps the model so that the sharded root covers embedding, layers and head in one forward."""

    def __init__(self, lm: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.lm: Any = lm
        self.chunk_tokens = chunk_tokens
        self.has_adapter = False

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Log-prob [T], with gradient, and entropy [T], without, of every response token."""
        hidden = hidden_states(self.lm, inputs)[inputs.predicting]
        chunks = [
            checkpoint(self._chunk, h, t, temperature, use_reentrant=False)
            for h, t, temperature in zip(
                hidden.split(self.chunk_tokens),
                inputs.targets.split(self.chunk_tokens),
                inputs.temperatures.split(self.chunk_tokens),
                strict=True,
            )
        ]
        return torch.cat([log_probs for log_probs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])

    def _chunk(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm.lm_head(hidden).float() / temperatures.unsqueeze(1)
        log_probs = logits.log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def hidden_states(lm: Any, inputs: ModelInputs) -> Tensor:
    """[N, hidden] of the packed tokens, after the last layer; `lm` is a Hugging Face model with a backbone `model`."""
    states: Tensor = lm.model(
        input_ids=inputs.token_ids.unsqueeze(0),
        position_ids=inputs.packing.columns.unsqueeze(0),
        packing=inputs.packing,
        use_cache=False,
    ).last_hidden_state[0]
    return states


def load_model(path: Path, dtype: torch.dtype, chunk_tokens: int) -> PackedCausalLM:
    """Load a checkpoint folder with packed attention. Never reaches the network."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path {path} is not a model folder (no config.json); give a Hugging Face checkpoint")
    from transformers import AutoModelForCausalLM

    attention.register()
    lm = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    return PackedCausalLM(lm, chunk_tokens)


def shard(model: PackedCausalLM | PackedScalarModel, *, reshard_after_forward: bool = True) -> None:
    """FSDP2 over the default process group: each decoder layer on its own, then the root with what is left."""
    for layer in model.lm.model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)


def add_adapter(model: PackedCausalLM, config: LoraConfig) -> None:
    """Freeze the weights and put a low-rank adapter beside those it targets. It begins as no change at all."""
    import peft

    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), lora_dropout=0.0
    )
    peft.inject_adapter_in_model(adapter, model.lm)
    model.has_adapter = True


def is_pushed(model: PackedCausalLM, name: str) -> bool:
    """Whether rollout servers need the parameter: all, or only the adapter's."""
    return not model.has_adapter or name.endswith((_LORA_A, _LORA_B))


def pushed_name(name: str) -> str:
    """Of a parameter, as rollout servers know it: the Hugging Face name, or that of the weight it changes."""
    for ending, suffix in ((_LORA_A, "lora_A"), (_LORA_B, "lora_B")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight.{suffix}"
    return name


def full_weight(parameter: Tensor) -> Tensor:
    """The whole parameter. A collective when it is sharded: every rank calls it, in the same order."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
