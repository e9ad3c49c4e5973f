"""Low-rank adapters (LoRA): adding one to a model, and which parameters a weight push then sends."""

from __future__ import annotations

from penstock.config.learner import LoraConfig
from penstock_learner.model.causal_lm import PackedCausalLM

_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft ends the names of an adapter's two matrices."""


def add_adapter(model: PackedCausalLM, config: LoraConfig) -> None:
    """Freeze the weights and add a low-rank adapter to those it targets. It starts as no change at all."""
    import peft

    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), lora_dropout=0.0
    )
    peft.inject_adapter_in_model(adapter, model.lm)
    model.has_adapter = True


def is_pushed(model: PackedCausalLM, name: str) -> bool:
    """Whether rollout servers need the parameter. They need all of them, or only the adapter's where there is one."""
    return not model.has_adapter or name.endswith((_LORA_A, _LORA_B))


def pushed_name(name: str) -> str:
    """A parameter's name as rollout servers know it.

    A plain weight keeps its Hugging Face name. A matrix of an adapter is named after the weight that it changes, for
    example `model.layers.0.mlp.up_proj.weight.lora_A`."""
    for ending, suffix in ((_LORA_A, "lora_A"), (_LORA_B, "lora_B")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight.{suffix}"
    return name
